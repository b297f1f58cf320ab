import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.models.model_metadata import ModelMetadata, SplitSamples
from pipelines.tracking.models.models import (
    AVERAGED_MODEL,
    MODEL,
    averaged_model_uri,
    load_model,
    log_model,
    model_metadata,
    using_store,
)
from pipelines.tracking.models.registry import Promotion, registry_uri, standing
from pipelines.tracking.store import served
from pipelines.tracking.store.runs import start_run
from pipelines.tracking.store.served import find_model, read_model_file
from pipelines.tracking.store.store import TrackedRun, TrackingError

mlflow_3 = pytest.mark.skipif(not hasattr(MlflowClient, "create_logged_model"), reason="of MLflow 3")
mlflow_2 = pytest.mark.skipif(hasattr(MlflowClient, "create_logged_model"), reason="of MLflow 2")


IMAGES = {"a": np.arange(64, dtype=np.uint16).reshape(2, 4, 4, 2)}


@pytest.fixture(scope="module")
def model() -> keras.Model:
    inputs = {"a": keras.Input((4, 4, 2), dtype="uint16", name="a")}
    hidden = keras.layers.Flatten()(keras.ops.cast(inputs["a"], "float32"))
    return keras.Model(inputs, keras.layers.Dense(3, activation="sigmoid")(hidden))


@pytest.fixture
def register(client: MlflowClient, model: keras.Model) -> Callable[..., TrackedRun]:
    """Registers a model of a new run with a score."""

    def registered(name: str, rule: Promotion, value: float | None, described: ModelMetadata, times: int = 1) -> Any:
        run = start_run("tests", None, {}, {})
        if value is not None:
            client.log_metric(run.run_id, rule.metric, value, step=8)
        for _ in range(times):
            log_model(run, model, described, name, step=8, promotion=rule)
        return run

    return registered


def test_a_model_comes_back_with_signature_metadata_and_equal_outputs(run: TrackedRun, model: keras.Model) -> None:
    uri = log_model(run, model, ModelMetadata(("x", "y", "z")), "registered", step=8)
    for address in (uri, "models:/registered/1"):
        loaded, metadata = load_model(address)
        assert (metadata.class_names, metadata.run_id) == (("x", "y", "z"), run.run_id)
        np.testing.assert_array_equal(loaded(IMAGES), model(IMAGES))
    (signature,) = mlflow.models.get_model_info(uri).signature.inputs.to_dict()
    assert (signature["name"], signature["tensor-spec"]) == ("a", {"dtype": "uint16", "shape": (-1, 4, 4, 2)})
    served = mlflow.pyfunc.load_model(uri).predict(IMAGES)
    outputs = next(iter(served.values())) if isinstance(served, dict) else served
    # Some threads of TensorFlow take the smallest float32 values for zero, others do not.
    np.testing.assert_allclose(outputs, model(IMAGES), rtol=1e-5, atol=1e-12)


@mlflow_3
def test_a_model_is_logged_once_for_each_step(
    run: TrackedRun, model: keras.Model, client: MlflowClient, writer: RunWriter
) -> None:
    writer.metrics({"val/loss": 0.5}, step=8)
    assert writer.drain() == ""
    environment = dict(os.environ)
    for name in (None, "once", "once"):  # as after a training that ended before the model was registered
        log_model(run, model, ModelMetadata(), name, step=8)
    outputs = client.get_run(run.run_id).outputs.model_outputs
    assert (
        [output.step for output in outputs],
        [version.source for version in client.search_model_versions("name = 'once'")],
    ) == ([8], [f"models:/{outputs[0].model_id}"])
    assert (
        [metric.value for metric in client.get_logged_model(outputs[0].model_id).metrics],
        len(client.get_metric_history(run.run_id, "val/loss")),
    ) == ([0.5], 1)
    # The run goes on, and the notebook that trains keeps its settings.
    assert (client.get_run(run.run_id).info.status, dict(os.environ)) == ("RUNNING", environment)
    log_model(run, model, ModelMetadata(), "once", step=16)
    # The store returns them in any order.
    assert sorted(output.step for output in client.get_run(run.run_id).outputs.model_outputs) == [8, 16]


@mlflow_2
def test_a_model_is_an_artifact_of_its_run_and_logged_once_for_each_step(
    run: TrackedRun, model: keras.Model, client: MlflowClient
) -> None:
    for step, versions in ((8, 1), (8, 1), (16, 2)):
        uri = log_model(run, model, ModelMetadata(("x",), archive=str(step)), "once", step=step)
        assert model_metadata(uri).archive == str(step)
        registered = client.search_model_versions("name = 'once'")
        assert [version.run_id for version in registered] == [run.run_id] * versions
    assert ({version.tags["optimizer_steps"] for version in registered}, client.get_run(run.run_id).info.status) == (
        {"8", "16"},
        "RUNNING",
    )
    client.set_tag(run.run_id, "groundswell.logged.model", "8")  # as after an attempt that died while it logged
    log_model(run, model, ModelMetadata(("x",), archive="17"), None, step=16)
    assert model_metadata(uri).archive == "17"


def test_a_run_has_models_of_several_names(run: TrackedRun, model: keras.Model) -> None:
    averaged = keras.models.clone_model(model)
    uris = [
        log_model(run, chosen, ModelMetadata(("x",), ema=ema), None, step=8, name=name)
        for chosen, ema, name in ((averaged, 0.9, AVERAGED_MODEL), (model, None, MODEL))
    ]
    assert uris[0] == averaged_model_uri(uris[1])
    uris += [f"runs:/{run.run_id}/model_ema", f"runs:/{run.run_id}/model"]  # as they are named within the run
    uris += [averaged_model_uri(uris[1]), f"runs:/{run.run_id}"]  # a run alone means the model that it ended with
    for uri, expected, ema in zip(uris, (averaged, model) * 3, (0.9, None) * 3, strict=True):
        loaded, metadata = load_model(uri)
        assert metadata.ema == ema
        np.testing.assert_array_equal(loaded(IMAGES), expected(IMAGES))


@mlflow_3
def test_a_model_is_named_after_its_run(model: keras.Model, mlflow_store: str, client: MlflowClient) -> None:
    run = start_run("tests", "r50: 0.5/g8", {}, {})
    experiment = client.get_run(run.run_id).info.experiment_id
    uri = log_model(run, model, ModelMetadata(("x",), archive="8"), None, step=8)
    assert uri == f"runs:/{run.run_id}/r50- 0-5-g8"
    with using_store(mlflow_store):
        assert mlflow.keras.load_model(uri).count_params() == model.count_params(), "plain MLflow loads it"
    # By its name within the run, it is the newest one that is complete.
    alias = f"runs:/{run.run_id}/model"
    assert log_model(run, model, ModelMetadata(("x",), archive="16"), None, step=16) == uri
    assert [model_metadata(address).archive for address in (alias, uri)] == ["16", "16"]
    served = find_model(alias)
    assert (served.uri, served.metadata.run_id) == (f"models:/{served.model_id}", run.run_id)
    assert read_model_file(served).startswith(b"PK")
    assert {logged.name for logged in client.search_logged_models([experiment])} == {"r50- 0-5-g8"}


@mlflow_3
def test_a_model_whose_upload_failed_is_not_listed_beside_the_one_that_is_logged_later(
    run: TrackedRun, model: keras.Model, client: MlflowClient
) -> None:
    from mlflow.entities import LoggedModelOutput

    experiment = client.get_run(run.run_id).info.experiment_id
    tags, others = {"groundswell.model": "model"}, {"source_run_id": run.run_id}
    killed, refused = (client.create_logged_model(experiment, name="model", tags=tags, **others) for _ in range(2))
    for left in (killed, refused):
        client.log_outputs(run.run_id, [LoggedModelOutput(left.model_id, step=8)])
    client.finalize_logged_model(refused.model_id, "FAILED")
    mine = client.create_logged_model(experiment, name="mine", **others)
    uri = log_model(run, model, ModelMetadata(("x",)), None, step=8)
    found = {each.model_id: each.status for each in client.search_logged_models([experiment])}
    assert (found.pop(mine.model_id), list(found.values())) == ("PENDING", ["READY"])
    assert load_model(uri)[1].class_names == ("x",)


@pytest.mark.parametrize("has_tags_of_models", [pytest.param(True, marks=mlflow_3), False])
def test_thresholds_are_those_that_were_kept_last_or_logged(
    has_tags_of_models: bool,
    run: TrackedRun,
    model: keras.Model,
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served, "HAS_TAGS_OF_MODELS", has_tags_of_models)
    uri = log_model(run, model, ModelMetadata(("x", "y", "z"), thresholds=(0.1, 0.2, 0.3)), None, step=8)
    other = log_model(run, model, ModelMetadata(("x",)), None, step=8, name="other")
    assert (served.find_model(uri).thresholds, served.find_model(other).thresholds) == ((0.1, 0.2, 0.3), None)
    folder = mlflow.artifacts.download_artifacts(uri, dst_path=str(tmp_path / "model"), tracking_uri=mlflow_store)
    for _ in range(2):
        served.store_thresholds(served.find_model(uri), [0.4, 0.5, 0.6])
        assert (served.find_model(uri).thresholds, served.find_model(other).thresholds) == ((0.4, 0.5, 0.6), None)
    exported = served.find_model(folder)
    assert exported.thresholds == (0.4, 0.5, 0.6), "the store knows it"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    exported = served.find_model(folder)
    assert exported.thresholds == (0.1, 0.2, 0.3)
    served.store_thresholds(exported, [0.4, 0.5, 0.6])
    assert served.find_model(folder).thresholds == (0.1, 0.2, 0.3), "that store does not"


def test_thresholds_that_a_tag_cannot_hold_do_not_hide_the_model(
    run: TrackedRun, model: keras.Model, mlflow_store: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(served, "HAS_TAGS_OF_MODELS", False)
    uri = log_model(run, model, ModelMetadata(("x",), thresholds=(0.1,)), None, step=8)
    served.store_thresholds(served.find_model(uri), [1 / 3] * 500)
    assert served.find_model(uri).thresholds == (0.1,)
    assert "too long for a tag of MLflow 2" in caplog.text


@pytest.mark.timeout(60)
def test_files_of_a_store_that_is_away_are_not_waited_for(
    run: TrackedRun, model: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = served.find_model(log_model(run, model, ModelMetadata(("x",)), None, step=8))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(TrackingError, match=r"^no answer from MLflow at http:"):
        served.read_model_file(found)


@pytest.mark.parametrize("uri", ["runs:/0123456789abcdef0123456789abcdef/model", "models:/absent/1", "models:/x/y/z"])
def test_an_unknown_model_is_one_line(run: TrackedRun, uri: str) -> None:
    with pytest.raises(ValueError, match=uri.split("/")[1]) as caught:
        model_metadata(uri)
    assert "\n" not in str(caught.value)


def test_the_champion_changes_only_by_the_margin(client: MlflowClient, register: Callable[..., TrackedRun]) -> None:
    name, rule, values = "main.land.cover", Promotion("val/f1_macro", 0.01), [0.50, 0.505, 0.52, 0.515, 0.7, 0.71]
    expected = ["champion", "challenger", "champion", "challenger", "challenger", "challenger"]
    for number, (value, status, champion) in enumerate(zip(values, expected, "113333", strict=True), start=1):
        # The last two are of another dataset, whose figures say nothing about the champion.
        described = ModelMetadata(dataset_fingerprint="f" if number < 5 else "other")
        run = register(name, rule, value, described, times=2)  # as after a training that ended while it registered
        version = client.get_model_version(name, str(number))
        assert (version.tags["validation_status"], version.run_id) == (status, run.run_id), number
        assert str(client.get_registered_model(name).aliases["champion"]) == champion
        line = standing(run, name)
        assert line.startswith(f"{name} version {number} is {status}: ")
        assert ("set_registered_model_alias" in line) == (number > 4)
    assert line == (
        "main.land.cover version 6 is challenger: val/f1_macro 0.7100, version 3 has 0.5200 on another dataset, which "
        "is not compared. To make it the champion: in Python, mlflow.MlflowClient().set_registered_model_alias("
        "'main.land.cover', 'champion', '6'), or on the model's page of MLflow"
    )
    assert standing(start_run("tests", None, {}, {}), name) == "", "that run has registered nothing"
    assert (
        client.get_model_version(name, "2").tags["validation_reason"],
        str(client.get_registered_model(name).aliases["challenger"]),
    ) == ("val/f1_macro 0.5050, version 1 has 0.5000, and the margin is 0.01", "6")
    assert len(client.search_model_versions(f"name = '{name}'")) == len(values)


def test_a_champion_that_was_deleted_has_a_successor(client: MlflowClient, register: Callable[..., TrackedRun]) -> None:
    rule = Promotion("val/f1_macro", 0.01)
    register("bereft", rule, 0.9, ModelMetadata())
    client.delete_model_version("bereft", "1")
    register("bereft", rule, 0.1, ModelMetadata())
    assert client.get_model_version("bereft", "2").tags["validation_status"] == "champion"
    assert client.get_model_version_by_alias("bereft", "champion").version in (2, "2")


def test_a_model_has_an_example_and_a_card(
    run: TrackedRun, model: keras.Model, mlflow_store: str, client: MlflowClient, tmp_path: Path
) -> None:
    for name, value in (("val/f1_macro", 0.4321), ("speed/images_per_second", 17.0), ("system/rank-0/x", 1.0)):
        client.log_metric(run.run_id, name, value, step=8)
    client.log_param(run.run_id, "optimizer.name", "lars")
    client.log_param(run.run_id, "launch.num_workers", 16)
    described = ModelMetadata(
        class_names=("Arable land", "Sea"),
        task="multi_label",
        groups={"a": ("B02", "B03")},
        thresholds=(0.25, 0.75),
        archive="bigearthnet_v2",
        dataset_fingerprint="0123abcd",
        source_fingerprint="4567cdef",
        samples={"train": SplitSamples(1200, (1100, 300)), "test": SplitSamples(70, (60, 20))},
    )
    example = {"a": np.arange(32, dtype=np.uint16).reshape(1, 4, 4, 2)}
    uri = log_model(run, model, described, None, step=8, example=example)
    folder = Path(
        mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(tmp_path), tracking_uri=mlflow_store)
    )
    card = (folder / "model_card.md").read_text()
    assert [
        text
        for text in (
            "2 classes",
            "`a`: bands B02, B03",
            "Arable land, Sea",
            "`0123abcd`",
            "## Scores\n* val/f1_macro: 0.4321\n\n",
            "* Arable land: 0.2500\n* Sea: 0.7500",
            "`4567cdef`",
            "| samples | test | train |\n|---|---|---|\n| all | 70 | 1,200 |\n",
            "| Arable land | 60 | 1,100 |\n| Sea | 20 | 300 |\n",
            "## Recipe\n* `optimizer.name`: lars\n",
            "## Limits",
        )
        if text not in card
    ] == []
    assert "launch.num_workers" not in card, "it does not decide the model"
    saved: Any = mlflow.models.Model.load(folder).load_input_example(str(folder))
    np.testing.assert_array_equal(saved["a"], example["a"])
    # As after a training that ended between model and card.
    assert (log_model(run, model, described, None, step=8, example=example), model_metadata(uri)) == (
        uri,
        replace(described, optimizer_steps=8, run_id=run.run_id),
    )


@mlflow_3
def test_the_page_of_a_model_says_what_it_is_and_who_made_it(
    run: TrackedRun, model: keras.Model, client: MlflowClient
) -> None:
    client.log_param(run.run_id, "optimizer.name", "lars")
    log_model(run, model, ModelMetadata(tuple(f"class {n}" for n in range(1000)), "single_label"), None, step=8)
    made_by = client.get_run(run.run_id)
    (output,) = made_by.outputs.model_outputs
    tags = client.get_logged_model(output.model_id).tags
    assert tags["mlflow.user"] == made_by.data.tags["mlflow.user"]
    text, end = tags["mlflow.note.content"], r"\(The whole card is the artifact model_card\.md\.\)"
    assert re.fullmatch(rf"A single-label classifier of 1000 classes\..*{end}", text, re.DOTALL)
    assert "lars" not in text, "the recipe is among the parameters"
    assert len(text) < 5000


def test_a_lower_loss_is_better_and_no_metric_is_no_champion(
    client: MlflowClient, register: Callable[..., TrackedRun]
) -> None:
    for value in (0.5, 0.6, 0.4, None):
        register("by_loss", Promotion("val/loss", 0.0), value, ModelMetadata())
    found = {int(each.version): each.tags for each in client.search_model_versions("name='by_loss'")}
    assert [found[number]["validation_status"] for number in (1, 2, 3, 4)] == ["champion", "challenger"] * 2


@pytest.mark.parametrize(
    ("uri", "name", "registry"),
    [
        ("databricks", "main.land.cover", "databricks-uc"),
        ("databricks://prod", "main.land.cover", "databricks-uc://prod"),
        ("databricks", "cover", None),
        ("http://localhost:5000", "main.land.cover", None),
    ],
)
def test_unity_catalogs_names_go_to_its_registry(uri: str, name: str, registry: str | None) -> None:
    assert registry_uri(uri, name) == registry
