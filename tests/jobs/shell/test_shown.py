"""What a notebook shows of a finished training."""

import base64
import re
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle
from mlflow import MlflowClient

from jobs.train import TrainedRun
from pipelines.scoring.job import Scored
from pipelines.storage.folder import Location
from pipelines.tracking.store.queries import page_of
from pipelines.tracking.store.runs import start_run
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.ranks.results import Evaluation, TrainingSummary

VIEW = "workflowType=machine_learning"
HISTORY = [
    {"train/loss": 0.75, "val/loss": 0.5, "val/f1_micro": 0.25},
    {"train/loss": 0.5, "val/loss": 0.375, "val/f1_micro": 0.5},
]


@pytest.fixture
def trained(mlflow_store: str, tmp_path: Path) -> TrainedRun:
    run = start_run("shown", "name", {}, {})
    summary = TrainingSummary("runs:/x/model", HISTORY, "/c/step-2.npz", 10, ended="<no better epoch>", model_epoch=1)
    return TrainedRun(run, summary, Location.at(tmp_path))


def test_the_history_is_a_table_and_a_figure(trained: TrainedRun) -> None:
    assert (trained.history.loc[2, "val/loss"], trained.model_uri) == (0.375, "runs:/x/model")
    assert (trained.history.index.name, list(trained.history.index)) == ("epoch", [1, 2])
    loss, score = trained.plot().axes
    assert ([line.get_label() for line in loss.lines], list(score.lines[0].get_ydata())) == (
        ["training", "validation"],
        [0.25, 0.5],
    )


def test_a_notebook_shows_curves_table_and_places(trained: TrainedRun) -> None:
    shown = trained._repr_html_()
    # A store in a file has no page.
    assert [
        part
        for part in ("<code>runs:/x/model</code>", "&lt;no better epoch&gt;", "0.3750", "mlflow ui --host 127.0.0.1")
        if part not in shown
    ] == []
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    assert base64.b64decode(picture).startswith(b"\x89PNG")


def test_a_server_has_a_page_of_the_run(monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> None:
    run, client = start_run("shown", "name", {}, {}), MlflowClient(mlflow_store)  # in place of a server's
    assert page_of(run) is None
    monkeypatch.setenv("DATABRICKS_HOST", "https://workspace.example/")
    monkeypatch.setattr("pipelines.tracking.store.queries.runs_client", lambda uri: client)
    assert (
        page_of(TrackedRun("databricks", run.run_id)) == f"https://workspace.example/ml/experiments/1/runs/{run.run_id}"
    )
    assert (
        page_of(TrackedRun("http://user:password@server:5000", run.run_id))
        == f"http://***@server:5000/#/experiments/1/runs/{run.run_id}?{VIEW}"
    )


def test_a_server_that_does_not_answer_leaves_the_link_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert page_of(TrackedRun("http://127.0.0.1:1", "0" * 32)) is None


def test_an_evaluation_is_a_table_of_classes() -> None:
    rows = [
        {"class": "rare <1>", "support": 1, "f1": 0.5},
        {"class": "often", "support": 9, "f1": 0.75},
    ]
    evaluation = Evaluation({"f1_micro": 0.7}, rows, split="test")
    assert list(evaluation.table.index) == ["often", "rare <1>"]
    assert re.search(r"0\.7000[\s\S]*rare &lt;1&gt;", evaluation._repr_html_())


def test_an_evaluation_has_bars_and_a_link_to_its_run(trained: TrainedRun) -> None:
    rows = [{"class": "water", "support": 1, "f1": 0.5, "average_precision": 0.25}]
    evaluation = Evaluation({"f1_micro": 0.7}, rows, split="test", run=trained.run)
    (axes,) = evaluation.plot().axes
    assert (axes.get_title(), [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]) == (
        "test",
        [0.5, 0.25],
    )
    assert f"test: MLflow run {trained.run.run_id} <code>mlflow ui " in evaluation._repr_html_()
    server = Evaluation({}, rows, split="test", run=TrackedRun("http://server:5000", trained.run.run_id))
    client = MlflowClient(trained.run.uri)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.tracking.store.queries.runs_client", lambda uri: client)
        assert f'<a href="http://server:5000/#/experiments/1/runs/{trained.run.run_id}?{VIEW}"' in server._repr_html_()


def test_predictions_say_how_many_and_where() -> None:
    shown = Scored(1200, 3, {"<truncated>": 2, "no label": 1}, 600, "/data/predictions")._repr_html_()
    assert [
        part
        for part in ("1,200 in <code>/data/predictions</code>", "3, 2 &lt;truncated&gt;, 1 no label", "600")
        if part not in shown
    ] == []
