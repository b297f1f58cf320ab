from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.tracking import fluent

from pipelines.tracking.store import queries, runs
from pipelines.tracking.store.experiments import chosen_experiment, experiment_of
from pipelines.tracking.store.recorded import recorded_training
from pipelines.tracking.store.store import TrackedRun


def test_an_unknown_run_cannot_be_continued(run: TrackedRun) -> None:
    with pytest.raises(ValueError, match="0123456789abcdef"):
        runs.continue_run("0123456789abcdef")


def test_a_server_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match="MLFLOW_TRACKING_URI"):
        runs.start_run("tests", None, {}, {})


@pytest.mark.parametrize("deleted", ["run", "experiment"])
def test_a_deleted_run_is_no_parent(deleted: str, run: TrackedRun, client: MlflowClient) -> None:
    assert queries.has_run(run)
    getattr(client, f"delete_{deleted}")(getattr(client.get_run(run.run_id).info, f"{deleted}_id"))
    assert not queries.has_run(run)
    assert not runs.is_known(run.run_id)


def test_a_sqlite_file_is_found_whatever_its_address_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db?timeout=60"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert runs.check_store("tests") == f"{uri}, which the first run creates"
    run = runs.start_run("tests", None, {}, {})
    assert (
        {path.name for path in (tmp_path / "new").iterdir()},
        runs.check_store("tests"),
        experiment_of(run.run_id),
        recorded_training(run.run_id, groups=(), metrics=()).run_id,
    ) == ({"mlflow.db"}, f"{uri} answers", "tests", run.run_id)


def test_a_run_belongs_to_the_active_experiment(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.setenv(name, "")  # MLflow sets one, and both are restored afterwards
        monkeypatch.delenv(name)
    # MLflow's own: `set_experiment` keeps its choice there for ever, and has no public way back.
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    assert chosen_experiment(None) == "groundswell"
    mlflow.set_experiment("of the notebook")
    found = [chosen_experiment(None), chosen_experiment("configured"), chosen_experiment(None, offline=True)]
    assert (found, experiment_of(runs.start_run(chosen_experiment(None), None, {}, {}).run_id)) == (
        ["of the notebook", "configured", "groundswell"],
        "of the notebook",
    )
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    with pytest.raises(ValueError, match=r"^MLflow's active experiment: .*77"):
        chosen_experiment(None)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    assert (chosen_experiment(None), client.get_experiment_by_name("of the environment")) == (
        "of the environment",
        None,
    )
