"""The Databricks bundle against the schema of its CLI, without a workspace; and its commands against our own."""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.schema import RunConfig
from jobs.command import read_config
from jobs.result import Result, model_uri_of
from jobs.verbs import parser_of

jsonschema = pytest.importorskip("jsonschema")
regex = pytest.importorskip("regex")

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "databricks"
Document = dict[str, Any]


def merged(first: Any, second: Any) -> Any:
    """As the CLI merges the files of `include`."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: merged(first.get(key), second.get(key, first.get(key))) for key in first | second}
    return first if second is None else second


@pytest.fixture(scope="module")
def bundle() -> Document:
    document = yaml.safe_load((FOLDER / "databricks.yml").read_text())
    for pattern in document["include"]:
        for path in sorted(FOLDER.glob(pattern)):
            document = merged(document, yaml.safe_load(path.read_text()))
    return document


@pytest.fixture(scope="module")
def mistakes(shared_data: Path) -> Callable[[Document], list[str]]:
    def pattern(validator: Any, expression: str, instance: Any, schema: Any) -> Iterator[Any]:
        # The schema's patterns use \p{L}, which Python's `re` does not know.
        if isinstance(instance, str) and not regex.search(expression, instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {expression!r}")

    schema = json.loads((shared_data / "schemas" / "databricks_bundle.schema.json").read_text())
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})(schema)

    def leaves(error: Any) -> Iterator[Any]:
        """The reasons of the alternative that fits best: the one that got deepest into the document."""
        if not error.context:
            yield error
            return
        deepest = max(len(each.absolute_path) for each in error.context)
        for each in error.context:
            if len(each.absolute_path) == deepest:
                yield from leaves(each)

    def find(document: Document) -> list[str]:
        found = []
        for error in validator.iter_errors(document):
            leaf = max(leaves(error), key=lambda each: len(each.absolute_path))
            found.append("/".join(map(str, leaf.absolute_path)) + ": " + leaf.message)
        return found

    return find


def test_the_bundle_fits_the_schema(bundle: Document, mistakes: Callable[[Document], list[str]]) -> None:
    assert mistakes(bundle) == []


def test_a_target_in_production_says_where_its_only_copy_lies(bundle: Document) -> None:
    """The CLI asks for it, unless a service principal deploys; the schema does not."""
    targets = [each for each in bundle["targets"].values() if each["mode"] == "production"]
    assert len(targets) == 1
    assert all(each["workspace"]["root_path"].startswith("/Workspace/Users/") for each in targets)


CLUSTER = "resources/jobs/train/job_clusters/1/new_cluster"
TASK = "resources/jobs/train/tasks/1"


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("bundle/name", None, "bundle"),
        ("artifacts/wheel/typ", "whl", "artifacts/wheel"),
        ("variables/workers/defualt", 4, "variables/workers"),
        ("targets/production/mod", "production", "targets/production"),
        (f"{CLUSTER}/data_security_mode", "DEDICATED", CLUSTER),
        (f"{CLUSTER}/num_worker", 4, CLUSTER),
        (f"{CLUSTER}/num_workers", "four", CLUSTER),
        (f"{CLUSTER}/init_scripts/0/volumes/destination", None, f"{CLUSTER}/init_scripts/0"),
        (f"{TASK}/task_key", None, TASK),
        (f"{TASK}/depends_on", ["prepare"], f"{TASK}/depends_on"),
        (f"{TASK}/python_wheel_task/entry_point", None, f"{TASK}/python_wheel_task"),
        (f"{TASK}/libraries/0", "groundswell.whl", f"{TASK}/libraries/0"),
    ],
)
def test_mistakes_are_found(
    bundle: Document,
    mistakes: Callable[[Document], list[str]],
    changed: Callable[..., Document],
    path: str,
    value: Any,
    place: str,
) -> None:
    (mistake, *_) = mistakes(changed(bundle, path, value))
    assert mistake.startswith(place)


VOLUME = "/Volumes/${var.catalog}/${var.schema}/${var.volume}/"


def clusters(bundle: Document) -> dict[str, Document]:
    """The clusters of the job, by their key."""
    found = bundle["resources"]["jobs"]["train"]["job_clusters"]
    return {cluster["job_cluster_key"]: cluster["new_cluster"] for cluster in found}


def own_mistakes(bundle: Document) -> list[str]:
    """What the schema cannot know: variables that nobody declares, other settings of Spark, files elsewhere."""
    new = clusters(bundle)["gpus"]
    found = sorted(set(re.findall(r"\$\{var\.([^}]*)\}", json.dumps(bundle))) - set(bundle["variables"]))
    if new["spark_conf"] != {
        "spark.dynamicAllocation.enabled": "false",
        "spark.task.resource.gpu.amount": "1",
        "spark.task.cpus": "${var.node_cores}",
    }:
        found.append("spark_conf")
    if new["spark_env_vars"] != {"GROUNDSWELL_HOROVOD_WHEEL": f"{VOLUME}${{var.horovod_wheel}}"}:
        found.append("spark_env_vars")
    if new["init_scripts"] != [{"volumes": {"destination": f"{VOLUME}install_horovod.sh"}}]:
        found.append("init_scripts")
    return found


@pytest.mark.parametrize(
    ("path", "value", "mistake"),
    [
        (f"{CLUSTER}/init_scripts/0/volumes/destination", "/Volumes/${var.volum}/install_horovod.sh", "volum"),
        (f"{CLUSTER}/init_scripts/0/volumes/destination", f"{VOLUME}install.sh", "init_scripts"),
        (f"{CLUSTER}/node_type_id", "${var.node_typ}", "node_typ"),
        (f"{CLUSTER}/spark_conf", {"spark.dynamicAlocation.enabled": "false"}, "spark_conf"),
        (f"{CLUSTER}/spark_env_vars", {"HOROVOD_WHEEL": "/Volumes/x.whl"}, "spark_env_vars"),
        ("artifacts/wheel/path", "${var.nothing}", "nothing"),
    ],
)
def test_mistakes_that_the_schema_does_not_know_are_found(
    bundle: Document, changed: Callable[..., Document], path: str, value: Any, mistake: str
) -> None:
    assert own_mistakes(bundle) == []
    assert mistake in own_mistakes(changed(bundle, path, value))


def resolved(text: str, bundle: Document) -> str:
    """A text with the variables' defaults in place of `${var.name}`."""
    given = {"archive": "/Volumes/main/default/bigearthnet/BigEarthNet"}
    values = {name: str(variable.get("default", given.get(name))) for name, variable in bundle["variables"].items()}
    text = re.sub(r"\$\{var\.(\w+)\}", lambda match: values[match[1]], text)
    return text.replace("${workspace.current_user.userName}", "me@example.com")


def parsed(bundle: Document) -> dict[str, argparse.Namespace]:
    """The arguments of each task by its verb; a mistake in a command is an error."""
    found = {}
    for task in bundle["resources"]["jobs"]["train"]["tasks"]:
        verb, *arguments = [resolved(word, bundle) for word in task["python_wheel_task"]["parameters"]]
        assert verb == task["task_key"]
        found[verb] = parser_of(verb).parse(arguments)
    return found


def configured(bundle: Document) -> dict[str, RunConfig]:
    """The configuration of each task, by its verb, where it trains, reads or scores; a mistake in it is an error."""
    return {verb: read_config(arguments) for verb, arguments in parsed(bundle).items() if hasattr(arguments, "config")}


def test_tasks_are_commands_of_ours_in_their_order(bundle: Document) -> None:
    configs = configured(bundle)
    tasks = bundle["resources"]["jobs"]["train"]["tasks"]
    before = {task["task_key"]: [each["task_key"] for each in task.get("depends_on", [])] for task in tasks}
    assert before == {
        "prepare": [],
        "train": ["prepare"],
        "evaluate": ["train"],
        "score": ["evaluate"],
        "compare": ["evaluate"],
    }
    assert len({configs[verb].dataset.path for verb in ("prepare", "train", "evaluate")}) == 1
    train, evaluate, score = (task["python_wheel_task"]["parameters"] for task in tasks[1:4])
    for later in (evaluate, score):
        assert later[later.index("--model") + 1] == train[train.index("--result") + 1]
    compare = parsed(bundle)["compare"]
    assert compare.experiment == [configs["train"].tracking.experiment]
    assert str(compare.output).startswith("/Volumes/")


def test_the_cluster_has_a_gpu_for_every_rank(bundle: Document) -> None:
    train = configured(bundle)["train"]
    new = clusters(bundle)["gpus"]
    assert resolved(new["num_workers"], bundle) == str(train.launch.num_workers)
    assert new["spark_conf"]["spark.task.resource.gpu.amount"] == str(train.launch.gpus_per_worker)
    assert new["data_security_mode"] == "DATA_SECURITY_MODE_DEDICATED"
    for task in bundle["resources"]["jobs"]["train"]["tasks"]:
        assert task["job_cluster_key"] == ("cores" if task["task_key"] == "prepare" else "gpus")
    assert train.tracking.experiment.startswith("/Users/")
    assert train.tracking.registered_model is not None
    assert train.tracking.registered_model.count(".") == 2


def test_all_cores_of_a_node_prepare(bundle: Document) -> None:
    """A task that takes a GPU, or all cores, would leave the others of its node idle."""
    new = clusters(bundle)["cores"]
    assert not set(new.get("spark_conf", {})) & {"spark.task.resource.gpu.amount", "spark.task.cpus"}
    assert "-gpu-" not in resolved(new["spark_version"], bundle)
    assert new["data_security_mode"] == "DATA_SECURITY_MODE_DEDICATED"


def test_a_training_is_continued_by_a_variable(bundle: Document) -> None:
    assert configured(bundle)["train"].training.resume_run is None
    bundle = json.loads(json.dumps(bundle))
    bundle["variables"]["resume_run"]["default"] = "latest"
    assert configured(bundle)["train"].training.resume_run == "latest"


def test_the_init_script_installs_the_horovod_wheel_only(bundle: Document) -> None:
    script = (FOLDER / "install_horovod.sh").read_text()
    commands = [line for line in script.splitlines() if line and not line.startswith(("#", "set "))]
    assert len(commands) == 1
    assert "--no-index --no-deps" in commands[0]
    assert "GROUNDSWELL_HOROVOD_WHEEL" in commands[0]
    assert clusters(bundle)["gpus"]["spark_env_vars"]["GROUNDSWELL_HOROVOD_WHEEL"].startswith("/Volumes/")


def test_the_result_of_a_training_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    Result("train", model_uri="runs:/1/model").write(path)
    assert model_uri_of(str(path)) == "runs:/1/model"
    assert model_uri_of("models:/main.default.groundswell/3") == "models:/main.default.groundswell/3"
    Result("train", ended="interrupted").write(path)
    with pytest.raises(ValueError, match=r"train\.json: that job has logged no model \(it ended: interrupted\)"):
        model_uri_of(str(path))
    with pytest.raises(ValueError, match=r"other\.json is no result of a training"):
        model_uri_of(str(tmp_path / "other.json"))


def test_neither_folder_is_a_package() -> None:
    """Databricks and Jupyter take their files as they are, and `jobs` is a package."""
    assert not list(FOLDER.rglob("__init__.py"))
