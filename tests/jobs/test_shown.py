"""What a notebook shows of a finished training."""

import base64
import re
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from jobs.train import TrainedRun
from pipelines.scoring.job import Scored
from pipelines.tracking.runs import page_of, start_run
from pipelines.tracking.store import TrackedRun
from pipelines.training.results import Evaluation, TrainingSummary

VIEW = "workflowType=machine_learning"
HISTORY = [
    {"train/loss": 0.75, "val/loss": 0.5, "val/f1_micro": 0.25},
    {"train/loss": 0.5, "val/loss": 0.375, "val/f1_micro": 0.5},
]


@pytest.fixture
def trained(mlflow_store: str, tmp_path: Path) -> TrainedRun:
    run = start_run("shown", "name", {}, {})
    summary = TrainingSummary("runs:/x/model", HISTORY, "/c/step-2.npz", 10, ended="<no better epoch>", model_epoch=1)
    return TrainedRun(run, summary, tmp_path)


def test_the_history_is_a_table_with_a_row_for_each_epoch(trained: TrainedRun) -> None:
    assert trained.history.loc[2, "val/loss"] == 0.375
    assert list(trained.history.index) == [1, 2]
    assert trained.history.index.name == "epoch"
    assert trained.model_uri == "runs:/x/model"


def test_the_curves_are_a_figure(trained: TrainedRun) -> None:
    loss, score = trained.plot().axes
    assert [line.get_label() for line in loss.lines] == ["training", "validation"]
    assert list(score.lines[0].get_ydata()) == [0.25, 0.5]


def test_a_notebook_shows_curves_table_and_places(trained: TrainedRun) -> None:
    shown = trained._repr_html_()
    assert "<code>runs:/x/model</code>" in shown
    assert "&lt;no better epoch&gt;" in shown
    assert "0.3750" in shown
    assert "mlflow ui --host 127.0.0.1" in shown, "a store in a file has no page"
    picture = re.search(r'src="data:image/png;base64,([^"]+)"', shown)
    assert picture is not None
    assert base64.b64decode(picture[1]).startswith(b"\x89PNG")


def test_a_server_has_a_page_of_the_run(monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> None:
    run = start_run("shown", "name", {}, {})
    assert page_of(run) is None
    monkeypatch.setenv("DATABRICKS_HOST", "https://workspace.example/")
    monkeypatch.setattr("pipelines.tracking.runs.MlflowClient", lambda uri: _Client(mlflow_store))
    assert (
        page_of(TrackedRun("databricks", run.run_id)) == f"https://workspace.example/ml/experiments/1/runs/{run.run_id}"
    )
    server = TrackedRun("http://user:password@server:5000", run.run_id)
    assert page_of(server) == f"http://***@server:5000/#/experiments/1/runs/{run.run_id}?{VIEW}"


class _Client:
    """Answers as the server would that holds this store."""

    def __init__(self, store: str) -> None:
        from mlflow import MlflowClient

        self.get_run = MlflowClient(store).get_run


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
    assert "rare &lt;1&gt;" in evaluation._repr_html_()
    assert "0.7000" in evaluation._repr_html_()


def test_an_evaluation_has_bars_and_a_link_to_its_run(trained: TrainedRun) -> None:
    rows = [{"class": "water", "support": 1, "f1": 0.5, "average_precision": 0.25}]
    evaluation = Evaluation({"f1_micro": 0.7}, rows, split="test", run=trained.run)
    (axes,) = evaluation.plot().axes
    assert axes.get_title() == "test"
    assert [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)] == [0.5, 0.25]
    assert f"test: MLflow run {trained.run.run_id} <code>mlflow ui " in evaluation._repr_html_()
    server = Evaluation({}, rows, split="test", run=TrackedRun("http://server:5000", trained.run.run_id))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.tracking.runs.MlflowClient", lambda uri: _Client(trained.run.uri))
        assert f'<a href="http://server:5000/#/experiments/1/runs/{trained.run.run_id}?{VIEW}"' in server._repr_html_()


def test_predictions_say_how_many_and_where() -> None:
    shown = Scored(1200, 3, {"<truncated>": 2, "no label": 1}, 600, "/data/predictions")._repr_html_()
    assert "1,200 in <code>/data/predictions</code>" in shown
    assert "3, 2 &lt;truncated&gt;, 1 no label" in shown
    assert "600" in shown
