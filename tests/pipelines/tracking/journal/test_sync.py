"""Runs that trained without MLflow, or that it has only a part of, in a real store."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient

from pipelines.tracking.journal.journal import driver_journal, rank_journal
from pipelines.tracking.journal.local_run import DatasetFacts, Description, LocalRun, locked, read_local_run
from pipelines.tracking.journal.sync import adopt, sync, unsynced
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store.runs import start_run
from pipelines.tracking.store.store import TrackedRun

FACTS = DatasetFacts("eurosat_rgb", "0123", '{"uri": "/data/eurosat"}', '{"mlflow_colspec": []}', '{"num_rows": 7}')
MADE = Description("offline", "r50-lars-g512-4w", {"a.b": "1"}, {"codec": "onebit"}, FACTS)
STARTED = 1_700_000_000_000


def trained_offline(output: Path, status: str = "TRAINED") -> Path:
    """The folder of a run without a store: rank 0 has written three steps of which the last has no checkpoint."""
    run = TrackedRun("", "offline-7")
    folder = output / run.run_id
    LocalRun(run.run_id, MADE, STARTED, is_stored=False, status=status, ended=STARTED + 5).write(folder)
    driver = RunWriter(run, driver_journal(folder))
    driver.tags({"attempt": "1"})
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-0.log").write_text("step 0")
    driver.folder(folder / "logs", "logs")
    assert driver.drain() == "tracking.offline=true"
    driver.close()
    rank = RunWriter(run, rank_journal(folder))
    rank.start()
    for step in (1, 2, 3):
        rank.metrics({"train/loss": 1 / step}, step=step, after_step=step)
    rank.checkpointed(2)
    assert rank.drain() == "tracking.offline=true"
    rank.close()
    return folder


def log_model(folder: Path, run: TrackedRun) -> str:
    return f"runs:/{run.run_id}/model"


def record_of(folder: Path) -> LocalRun:
    """What a folder says about its run."""
    local = read_local_run(folder)
    assert local is not None
    return local


def test_logs_are_uploaded_from_where_the_run_is_now(
    client: MlflowClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_offline(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "moved")  # or copied to another machine
    synced = sync(tmp_path / "moved" / "offline-7", log_model)
    assert [item.path for item in client.list_artifacts(synced.run_id, "logs")] == ["logs/rank-0.log"]
    shutil.rmtree(trained_offline(tmp_path / "second") / "logs")
    assert sync(tmp_path / "second" / "offline-7", log_model).status == "FINISHED"
    assert "/logs is not there any more: its files are not among the artifacts" in caplog.text


def test_a_run_without_a_store_is_written_later_once(client: MlflowClient, tmp_path: Path) -> None:
    folder = trained_offline(tmp_path)
    assert unsynced(tmp_path) == [folder]
    synced = sync(folder, log_model)
    assert (synced.status, synced.model_uri, synced.waiting, synced.folder) == (
        "FINISHED",
        f"runs:/{synced.run_id}/model",
        1,
        tmp_path / synced.run_id,
    )
    assert folder.resolve() == synced.folder, "the old name still leads there"

    run = client.get_run(synced.run_id)
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", STARTED, STARTED + 5)
    assert (run.info.run_name, run.data.params, run.data.tags["codec"], run.data.tags["attempt"]) == (
        "r50-lars-g512-4w",
        {"a.b": "1"},
        "onebit",
        "1",
    )
    (found,) = (each.dataset for each in run.inputs.dataset_inputs)
    facts = (found.name, found.digest, found.source_type, found.profile)
    assert (facts, [item.path for item in client.list_artifacts(run.info.run_id, "logs")]) == (
        ("eurosat_rgb", "0123", "local", '{"num_rows": 7}'),
        ["logs/rank-0.log"],
    )
    assert (
        [(m.step, m.value) for m in client.get_metric_history(synced.run_id, "train/loss")],
        client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"],
    ) == ([(1, 1.0), (2, 0.5)], "custom_model_development")

    again = sync(synced.folder, log_model)
    assert (again.run_id, again.waiting, len(client.search_runs([run.info.experiment_id]))) == (synced.run_id, 1, 1)


def test_a_sync_that_was_interrupted_makes_no_second_run(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained_offline(tmp_path)
    # First, the store has the run, and its folder does not know; then, the folder has its old name.
    for owner, method in ((LocalRun, "write"), (Path, "rename")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                adopt(folder)
    synced = sync(folder, log_model)
    assert [run.info.run_id for run in client.search_runs([client.get_run(synced.run_id).info.experiment_id])] == [
        synced.run_id
    ]


def test_a_model_that_cannot_be_made_leaves_a_failed_run_that_can_be_synced_again(
    client: MlflowClient, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no module named mine"):
        sync(trained_offline(tmp_path), Mock(side_effect=ValueError("no module named mine")))
    (left,) = unsynced(tmp_path)
    assert client.get_run(record_of(left).run_id).info.status == "FAILED"
    assert sync(left, log_model).status == "FINISHED"


@pytest.mark.parametrize("status", ["RUNNING", "TRAINED"])
def test_a_copy_of_a_run_changes_nothing_of_the_run(client: MlflowClient, tmp_path: Path, status: str) -> None:
    folder = sync(trained_offline(tmp_path), log_model).folder
    local = record_of(folder)
    shutil.copytree(folder, tmp_path / "backup")
    replace(local, status=status, is_reported=False).write(tmp_path / "backup")
    assert unsynced(tmp_path) == [folder], "its record of a step that no checkpoint holds"
    with pytest.raises(ValueError, match=f"backup is a copy of {folder}, which has the newer records: give that one"):
        sync(tmp_path / "backup", log_model)
    run = client.get_run(local.run_id)
    assert (run.info.status, run.data.tags.get("driver")) == ("FINISHED", None)
    # Where the run's own folder is gone, this one is the run.
    shutil.rmtree(folder)
    assert unsynced(tmp_path) == [tmp_path / "backup"]


def test_a_copy_of_a_run_that_was_never_written_makes_no_second_run(client: MlflowClient, tmp_path: Path) -> None:
    folder = trained_offline(tmp_path)
    shutil.copytree(folder, tmp_path / "offline-7.bak")
    assert unsynced(tmp_path) == [folder]
    synced = sync(folder, log_model)
    assert unsynced(tmp_path) == [synced.folder], "the old name leads to the run still"


def test_a_run_whose_driver_died_does_not_stay_running(client: MlflowClient, tmp_path: Path) -> None:
    run = start_run("offline", None, {}, {})
    folder = tmp_path / run.run_id
    LocalRun(run.run_id, MADE, STARTED, is_stored=True).write(folder)
    with locked(folder):
        assert unsynced(tmp_path) == [], "its driver lives"
        with pytest.raises(ValueError, match="is being trained or written by process"):
            sync(folder, log_model)
    (left,) = unsynced(tmp_path)
    assert sync(left, log_model).status == "FAILED"
    stored = client.get_run(run.run_id)
    assert (stored.info.status, stored.data.tags["driver"], unsynced(tmp_path)) == (
        "FAILED",
        "died before it could end this run",
        [],
    )
    assert record_of(folder).is_reported


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    driver_journal(tmp_path / "1").mkdir(parents=True)
    assert unsynced(tmp_path) == [tmp_path / "1"]
    with pytest.raises(ValueError, match=r"1 has no run\.json, as every run's folder has: train again$"):
        sync(tmp_path / "1", log_model)


def only_outside(folder: str, method: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A method of paths that is not permitted in one folder."""

    def permitted(path: Path) -> Any:
        if path.parent.name == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return method(path)

    return permitted


def test_what_cannot_be_read_does_not_hide_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [trained_offline(tmp_path / "made").rename(tmp_path / name) for name in ("first", "second")]
    (tmp_path / "made").rmdir()
    (tmp_path / "lost+found").mkdir()
    # The tests may be root's, who may read everything.
    for method, folder in (("is_file", "lost+found"), ("read_text", "first")):
        monkeypatch.setattr(Path, method, only_outside(folder, getattr(Path, method)))
    assert unsynced(tmp_path) == runs


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    assert unsynced(tmp_path) == []
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere: give the training\.output of the runs"):
        unsynced(tmp_path / "nowhere")
