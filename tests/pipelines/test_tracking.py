import subprocess
from pathlib import Path

import keras
import mlflow
import numpy as np
import pytest
from matplotlib.figure import Figure
from mlflow import MlflowClient

from pipelines import tracking
from pipelines.locations import redacted
from pipelines.tracking import RunWriter, TrackedRun


@pytest.fixture
def run(mlflow_store: str) -> TrackedRun:
    return tracking.start_run("tests", "name", {"a.b": 1}, {"tag": "value"})


def test_the_default_store_is_sqlite_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert tracking.tracking_uri() == f"sqlite:///{tmp_path}/mlruns/mlflow.db"


def test_everything_written_is_read_back(run: TrackedRun, mlflow_store: str) -> None:
    writer = RunWriter(run)
    writer.metrics({"loss": 0.5}, step=1)
    writer.curves({"learning_rate": [(step, step / 10) for step in range(1500)]})
    writer.text("hello", "config.yaml")
    for _ in range(2):
        writer.table([{"class": "x", "f1": 0.5}, {"class": "y", "f1": float("nan")}], "per_class.json")
    writer.figure(Figure(), "figure.png")
    tracking.end_run(run, "FINISHED")

    mlflow.set_tracking_uri(mlflow_store)
    table = mlflow.artifacts.load_dict(f"runs:/{run.run_id}/per_class.json")
    assert table == {"columns": ["class", "f1"], "data": [["x", 0.5], ["y", None]]}
    client = MlflowClient(mlflow_store)
    stored = client.get_run(run.run_id)
    assert stored.info.status == "FINISHED"
    assert stored.data.params == {"a.b": "1"}
    assert stored.data.tags["tag"] == "value"
    assert stored.data.metrics["loss"] == 0.5
    assert len(client.get_metric_history(run.run_id, "learning_rate")) == 1500
    assert {item.path for item in client.list_artifacts(run.run_id)} == {"config.yaml", "per_class.json", "figure.png"}


def test_a_model_comes_back_with_signature_metadata_and_equal_outputs(
    run: TrackedRun, mlflow_store: str, tmp_path: Path
) -> None:
    inputs = {"a": keras.Input((4, 4, 2), dtype="uint16", name="a")}
    hidden = keras.layers.Flatten()(keras.ops.cast(inputs["a"], "float32"))
    model = keras.Model(inputs, keras.layers.Dense(3, activation="sigmoid")(hidden))
    uri = RunWriter(run).model(model, {"class_names": ["x", "y", "z"]}, "registered")
    images = {"a": np.arange(64, dtype=np.uint16).reshape(2, 4, 4, 2)}
    for address in (uri, "models:/registered/1"):
        loaded, metadata = tracking.load_model(address)
        assert metadata["class_names"] == ["x", "y", "z"]
        assert metadata["run_id"] == run.run_id
        np.testing.assert_array_equal(loaded(images), model(images))
    signature = mlflow.models.get_model_info(uri).signature
    assert signature.inputs.to_dict()[0]["name"] == "a"
    assert signature.inputs.to_dict()[0]["tensor-spec"] == {"dtype": "uint16", "shape": (-1, 4, 4, 2)}
    served = mlflow.pyfunc.load_model(uri).predict(images)
    outputs = next(iter(served.values())) if isinstance(served, dict) else served
    np.testing.assert_allclose(outputs, model(images), rtol=1e-5)


@pytest.mark.parametrize("uri", ["runs:/0123456789abcdef0123456789abcdef/model", "models:/absent/1", "models:/x/y/z"])
def test_an_unknown_model_is_one_line(mlflow_store: str, uri: str) -> None:
    with pytest.raises(ValueError, match=uri.split("/")[1]) as caught:
        tracking.model_metadata(uri)
    assert "\n" not in str(caught.value)


def test_an_unknown_run_cannot_be_continued(mlflow_store: str) -> None:
    with pytest.raises(ValueError, match="0123456789abcdef"):
        tracking.continue_run("0123456789abcdef")


def test_git_revision(tmp_path: Path) -> None:
    assert tracking.git_revision(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    revision = tracking.git_revision(tmp_path)
    assert len(revision) == 40
    (tmp_path / "file").write_text("2")
    assert tracking.git_revision(tmp_path) == revision + "-dirty"


def test_a_server_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(RuntimeError, match="MLFLOW_TRACKING_URI"):
        tracking.start_run("tests", None, {}, {})


def test_a_write_that_fails_is_a_warning(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    lost = TrackedRun(run.uri, "0123456789abcdef0123456789abcdef")
    RunWriter(lost).metrics({"loss": 1.0}, step=0)
    tracking.end_run(lost, "FINISHED")
    assert caplog.text.count("MLflow did not take a write") == 2


@pytest.mark.parametrize(
    ("uri", "shown", "file"),
    [
        ("postgresql://user:pw@host/db", "postgresql://***@host/db", False),
        ("https://token@host:8080", "https://***@host:8080", False),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db", True),
    ],
)
def test_passwords_are_not_shown(uri: str, shown: str, file: bool) -> None:
    assert redacted(uri) == shown
    assert tracking.is_file_store(uri) is file
