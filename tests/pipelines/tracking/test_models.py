import os
from pathlib import Path

import keras
import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput

from pipelines.tracking.models import AVERAGED_MODEL, MODEL, load_model, log_model, model_metadata
from pipelines.tracking.store import TrackedRun
from pipelines.tracking.writer import RunWriter


@pytest.fixture
def model() -> keras.Model:
    inputs = {"a": keras.Input((4, 4, 2), dtype="uint16", name="a")}
    hidden = keras.layers.Flatten()(keras.ops.cast(inputs["a"], "float32"))
    return keras.Model(inputs, keras.layers.Dense(3, activation="sigmoid")(hidden))


def test_a_model_comes_back_with_signature_metadata_and_equal_outputs(run: TrackedRun, model: keras.Model) -> None:
    uri = log_model(run, model, {"class_names": ["x", "y", "z"]}, "registered", step=8)
    images = {"a": np.arange(64, dtype=np.uint16).reshape(2, 4, 4, 2)}
    for address in (uri, "models:/registered/1"):
        loaded, metadata = load_model(address)
        assert metadata["class_names"] == ["x", "y", "z"]
        assert metadata["run_id"] == run.run_id
        np.testing.assert_array_equal(loaded(images), model(images))
    signature = mlflow.models.get_model_info(uri).signature
    assert signature.inputs.to_dict()[0]["name"] == "a"
    assert signature.inputs.to_dict()[0]["tensor-spec"] == {"dtype": "uint16", "shape": (-1, 4, 4, 2)}
    served = mlflow.pyfunc.load_model(uri).predict(images)
    outputs = next(iter(served.values())) if isinstance(served, dict) else served
    # Some threads of TensorFlow take the smallest float32 values for zero, others do not.
    np.testing.assert_allclose(outputs, model(images), rtol=1e-5, atol=1e-12)


def test_a_model_is_logged_once_for_each_step(
    run: TrackedRun, model: keras.Model, mlflow_store: str, tmp_path: Path
) -> None:
    client = MlflowClient(mlflow_store)
    writer = RunWriter(run, tmp_path / "journal")
    writer.metrics({"val/loss": 0.5}, step=8)
    assert writer.drain() == ""
    environment = dict(os.environ)
    log_model(run, model, {}, None, step=8)
    # As after a training that ended before the model was registered.
    log_model(run, model, {}, "once", step=8)
    log_model(run, model, {}, "once", step=8)
    outputs = client.get_run(run.run_id).outputs.model_outputs
    assert [output.step for output in outputs] == [8]
    assert [version.source for version in client.search_model_versions("name = 'once'")] == [
        f"models:/{outputs[0].model_id}"
    ]
    assert [metric.value for metric in client.get_logged_model(outputs[0].model_id).metrics] == [0.5]
    assert len(client.get_metric_history(run.run_id, "val/loss")) == 1
    # The run goes on, and the notebook that trains keeps its settings.
    assert client.get_run(run.run_id).info.status == "RUNNING"
    assert dict(os.environ) == environment
    log_model(run, model, {}, "once", step=16)
    # The store returns them in any order.
    assert sorted(output.step for output in client.get_run(run.run_id).outputs.model_outputs) == [8, 16]


def test_a_run_has_models_of_several_names(run: TrackedRun, model: keras.Model) -> None:
    averaged = keras.models.clone_model(model)
    uris = [
        log_model(run, chosen, {"ema": ema}, None, step=8, name=name)
        for chosen, ema, name in ((averaged, 0.9, AVERAGED_MODEL), (model, None, MODEL))
    ]
    assert uris == [f"runs:/{run.run_id}/model_ema", f"runs:/{run.run_id}/model"]
    images = {"a": np.arange(64, dtype=np.uint16).reshape(2, 4, 4, 2)}
    for uri, expected, ema in zip(uris, (averaged, model), (0.9, None), strict=True):
        loaded, metadata = load_model(uri)
        assert metadata["ema"] == ema
        np.testing.assert_array_equal(loaded(images), expected(images))


def test_a_model_whose_logging_was_cut_off_is_failed_and_logged_anew(
    run: TrackedRun, model: keras.Model, mlflow_store: str
) -> None:
    client = MlflowClient(mlflow_store)
    experiment = client.get_run(run.run_id).info.experiment_id
    left = client.create_logged_model(experiment, name="model", source_run_id=run.run_id)
    client.log_outputs(run.run_id, [LoggedModelOutput(left.model_id, step=8)])  # here a driver was killed
    uri = log_model(run, model, {"class_names": ["x"]}, None, step=8)
    assert client.get_logged_model(left.model_id).status == "FAILED"
    (logged,) = (
        output.model_id
        for output in client.get_run(run.run_id).outputs.model_outputs
        if output.model_id != left.model_id
    )
    assert client.get_logged_model(logged).status == "READY"
    assert load_model(uri)[1]["class_names"] == ["x"]


@pytest.mark.parametrize("uri", ["runs:/0123456789abcdef0123456789abcdef/model", "models:/absent/1", "models:/x/y/z"])
def test_an_unknown_model_is_one_line(mlflow_store: str, uri: str) -> None:
    with pytest.raises(ValueError, match=uri.split("/")[1]) as caught:
        model_metadata(uri)
    assert "\n" not in str(caught.value)
