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
from jobs.shell.command import Result, model_uri_of, read_config
from jobs.shell.verbs import parser_of

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
def mistake(shared_data: Path) -> Callable[[Document], str]:
    """Says what is wrong with a document, by the error that got deepest into it; empty where nothing is."""

    def pattern(validator: Any, expression: str, instance: Any, schema: Any) -> Iterator[Any]:
        # The schema's patterns use \p{L}, which Python's `re` does not know.
        if isinstance(instance, str) and not regex.search(expression, instance):
            yield jsonschema.ValidationError(f"{instance!r} does not match {expression!r}")

    schema = json.loads((shared_data / "schemas" / "databricks_bundle.schema.json").read_text())
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})(schema)

    def find(document: Document) -> str:
        found = jsonschema.exceptions.best_match(validator.iter_errors(document))
        return "" if found is None else f"{'/'.join(map(str, found.absolute_path))}: {found.message}"

    return find


def test_the_bundle_fits_the_schema(bundle: Document, mistake: Callable[[Document], str]) -> None:
    assert mistake(bundle) == ""


def test_a_target_in_production_says_where_its_only_copy_lies(bundle: Document) -> None:
    """The CLI asks for it, unless a service principal deploys; the schema does not."""
    (target,) = (each for each in bundle["targets"].values() if each["mode"] == "production")
    assert target["workspace"]["root_path"].startswith("/Workspace/Users/")


CLUSTER, TASK = "resources/jobs/train/job_clusters/1/new_cluster", "resources/jobs/train/tasks/1"


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
    mistake: Callable[[Document], str],
    changed: Callable[..., Document],
    path: str,
    value: Any,
    place: str,
) -> None:
    assert mistake(changed(bundle, path, value)).startswith(place)


VOLUME = "/Volumes/${var.catalog}/${var.schema}/${var.volume}/"


def clusters(bundle: Document) -> dict[str, Document]:
    """The clusters of the job, by their key."""
    found = bundle["resources"]["jobs"]["train"]["job_clusters"]
    return {cluster["job_cluster_key"]: cluster["new_cluster"] for cluster in found}


def test_what_the_schema_cannot_know(bundle: Document) -> None:
    """Variables that nobody declares, other settings of Spark, files elsewhere."""
    assert set(re.findall(r"\$\{var\.([^}]*)\}", json.dumps(bundle))) <= set(bundle["variables"])
    expected = {
        "spark_conf": {
            "spark.dynamicAllocation.enabled": "false",
            "spark.task.resource.gpu.amount": "1",
            "spark.task.cpus": "${var.node_cores}",
        },
        "spark_env_vars": {"GROUNDSWELL_HOROVOD_WHEEL": f"{VOLUME}${{var.horovod_wheel}}"},
        "init_scripts": [{"volumes": {"destination": f"{VOLUME}install_horovod.sh"}}],
    }
    assert {name: clusters(bundle)["gpus"][name] for name in expected} == expected


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
    configs, tasks = configured(bundle), bundle["resources"]["jobs"]["train"]["tasks"]
    before = {task["task_key"]: [each["task_key"] for each in task.get("depends_on", [])] for task in tasks}
    assert (before, len({configs[verb].dataset.path for verb in ("prepare", "train", "evaluate")})) == (
        {
            "prepare": [],
            "train": ["prepare"],
            "evaluate": ["train"],
            "score": ["evaluate"],
            "compare": ["evaluate"],
        },
        1,
    )
    train, evaluate, score = (task["python_wheel_task"]["parameters"] for task in tasks[1:4])
    assert [later[later.index("--model") + 1] for later in (evaluate, score)] == [
        train[train.index("--result") + 1]
    ] * 2
    compare = parsed(bundle)["compare"]
    assert compare.experiment == [configs["train"].tracking.experiment]
    assert str(compare.output).startswith("/Volumes/")


def test_the_cluster_has_a_gpu_for_every_rank(bundle: Document) -> None:
    train, both = configured(bundle)["train"], clusters(bundle)
    assert (
        resolved(both["gpus"]["num_workers"], bundle),
        both["gpus"]["spark_conf"]["spark.task.resource.gpu.amount"],
    ) == (str(train.launch.num_workers), str(train.launch.gpus_per_worker))
    assert {new["data_security_mode"] for new in both.values()} == {"DATA_SECURITY_MODE_DEDICATED"}
    places = {task["task_key"]: task["job_cluster_key"] for task in bundle["resources"]["jobs"]["train"]["tasks"]}
    assert places == {**dict.fromkeys(places, "gpus"), "prepare": "cores"}
    assert train.tracking.experiment.startswith("/Users/")
    assert re.fullmatch(r"[^.]+\.[^.]+\.[^.]+", str(train.tracking.registered_model))


def test_all_cores_of_a_node_prepare(bundle: Document) -> None:
    """A task that takes a GPU, or all cores, would leave the others of its node idle."""
    new = clusters(bundle)["cores"]
    assert not set(new.get("spark_conf", {})) & {"spark.task.resource.gpu.amount", "spark.task.cpus"}
    assert "-gpu-" not in resolved(new["spark_version"], bundle)


def test_a_training_is_continued_by_a_variable(bundle: Document, changed: Callable[..., Document]) -> None:
    again = changed(bundle, "variables/resume_run/default", "latest")
    assert [configured(each)["train"].training.resume_run for each in (bundle, again)] == [None, "latest"]


def test_the_init_script_installs_the_horovod_wheel_only(bundle: Document) -> None:
    script = (FOLDER / "install_horovod.sh").read_text()
    (command,) = (line for line in script.splitlines() if line and not line.startswith(("#", "set ")))
    assert re.search(r"--no-index --no-deps.*GROUNDSWELL_HOROVOD_WHEEL", command)
    assert clusters(bundle)["gpus"]["spark_env_vars"]["GROUNDSWELL_HOROVOD_WHEEL"].startswith("/Volumes/")


def test_the_result_of_a_training_names_its_model(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    Result("train", model_uri="runs:/1/model").write(path)
    assert model_uri_of(str(path)) == "runs:/1/model"
    Result("train", ended="interrupted").write(path)
    for file, problem in (
        (path, r"train\.json: that job has logged no model \(it ended: interrupted\)"),
        (tmp_path / "other.json", r"other\.json is no result of a training"),
    ):
        with pytest.raises(ValueError, match=problem):
            model_uri_of(str(file))


def test_neither_folder_is_a_package() -> None:
    """Databricks and Jupyter take their files as they are, and `jobs` is a package."""
    assert not [*FOLDER.rglob("__init__.py"), *(FOLDER.parent / "notebooks").rglob("__init__.py")]
