import json
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from mlflow import MlflowClient

from pipelines.tracking import metrics
from pipelines.tracking.journal.writer import Point, RunWriter
from pipelines.tracking.store.runs import check_store, end_run, start_run
from pipelines.tracking.store.store import TrackedRun, worker_environment


@pytest.mark.filterwarnings("ignore:The filesystem tracking backend:FutureWarning")
@pytest.mark.parametrize("kind", ["database", "files"])
def test_everything_written_is_read_back(
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    artifact_text: Callable[[str, str, str], str],
    kind: str,
) -> None:
    uri = {"database": mlflow_store, "files": f"file://{tmp_path}/files"}[kind]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # this version of MLflow refuses it otherwise
    assert check_store() == uri + {"database": " answers", "files": ", which the first run creates"}[kind]
    run, client = start_run("tests", "name", {"a.b": 1}, {"tag": "value"}), MlflowClient(uri)
    assert (run.uri, worker_environment()["MLFLOW_ALLOW_FILE_STORE"]) == (uri, "true")
    writer = RunWriter(run, tmp_path / "journal")
    writer.metrics({"val/loss": 0.5}, step=1)
    writer.curves({"train/learning_rate": [Point(step, step / 10, 1_700_000_000_000) for step in range(1500)]})
    writer.text("hello", "config.yaml")
    for _ in range(2):
        writer.table([{"class": "x", "f1": 0.5}, {"class": "y", "f1": float("nan")}], "per_class.json")
    writer.figure(Figure(), "figure.png")
    assert writer.drain() == ""
    end_run(run, "FINISHED")

    assert (
        artifact_text(uri, run.run_id, "config.yaml"),
        json.loads(artifact_text(uri, run.run_id, "per_class.json")),
    ) == (
        "hello",
        {
            "columns": ["class", "f1"],
            "data": [["x", 0.5], ["y", None]],
        },
    )
    stored = client.get_run(run.run_id)
    assert (
        stored.info.status,
        stored.info.run_name,
        stored.data.params,
        stored.data.tags["tag"],
        stored.data.metrics["val/loss"],
    ) == ("FINISHED", "name", {"a.b": "1"}, "value", 0.5)
    assert (
        [(point.step, point.value) for point in client.get_metric_history(run.run_id, "train/learning_rate")],
        {item.path for item in client.list_artifacts(run.run_id)},
    ) == ([(step, step / 10) for step in range(1500)], {"config.yaml", "per_class.json", "figure.png"})


@pytest.mark.parametrize("deleted", ["run", "experiment"])
def test_what_is_written_while_a_run_is_deleted_is_kept_until_it_is_restored(
    run: TrackedRun, client: MlflowClient, tmp_path: Path, deleted: str
) -> None:
    news = list[str]()
    identifier = getattr(client.get_run(run.run_id).info, f"{deleted}_id")
    writer = RunWriter(run, tmp_path / "journal", on_news=lambda said, reason: news.append(said))
    writer.metrics({"train/loss": 1.0}, step=10)
    assert writer.drain() == ""
    getattr(client, f"delete_{deleted}")(identifier)
    writer.metrics({"train/loss": 0.5}, step=20)
    writer.text("x", "notes.txt")
    assert "deleted" in writer.drain(patience=0)
    assert writer.pending == 2
    getattr(client, f"restore_{deleted}")(identifier)
    writer.metrics({"train/loss": 0.25}, step=30)
    assert writer.drain() == ""
    writer.close()
    assert news == ["away", "back"]
    assert (
        [(point.step, point.value) for point in client.get_metric_history(run.run_id, "train/loss")],
        [item.path for item in client.list_artifacts(run.run_id)],
    ) == ([(10, 1.0), (20, 0.5), (30, 0.25)], ["notes.txt"])


def test_a_metric_that_is_not_listed_is_never_written(writer: RunWriter) -> None:
    with pytest.raises(AssertionError, match=r"not listed in pipelines/tracking/metrics\.py: \['train/speed'\]"):
        writer.metrics({"train/loss": 0.5, "train/speed": 1.0}, step=1)
    listed = ("train/loss", "val/top_5", "val_ema/loss", "test/f1_micro", "test/loss", "country-b/f1_micro")
    assert metrics.unlisted([*listed, *metrics.described()]) == []
    assert len(metrics.unlisted(["loss", "f1_micro", "range_test/steps", "val/f1_micro/x"])) == 4


@pytest.mark.parametrize("score", ["val/top_1", "val/f1_micro"])
def test_the_six_metrics_that_matter_are_the_first_charts(score: str) -> None:
    names = (
        "train/loss",
        "val/loss",
        score,
        "speed/images_per_second",
        "train/learning_rate",
        "exchange/payload_bytes_total",
    )
    measured = {name: float(number) for number, name in enumerate(names)} | {"time/encode_seconds": 9.0}
    # MLflow's page has a section of charts for each group, sorted by name.
    shown = sorted({**measured, **metrics.headlines(measured)})
    assert (
        [name.partition("/")[0] for name in shown].count("epoch"),
        {metrics.headlines(measured)[name] for name in shown[:6]},
    ) == (6, {0.0, 1.0, 2.0, 3.0, 4.0, 5.0})
    assert min(metrics.described()).startswith("epoch/")
