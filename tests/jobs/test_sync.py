"""`groundswell sync` as it is typed."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from conf.load import load
from jobs import cli
from pipelines.packages import MissingPackageError
from pipelines.remote_path import AnyPath, RemotePath, publish
from pipelines.storage import StorageError
from pipelines.tracking.journal import driver_journal
from pipelines.tracking.local_run import Description, LocalRun, LocalStatus, read_local_run, update_local_run
from pipelines.tracking.store import TrackedRun
from pipelines.tracking.sync import adopt
from pipelines.tracking.writer import RunWriter
from pipelines.training.driver_record import with_stored_run
from pipelines.training.held_run import held_run


def make_offline(folder: Path, status: LocalStatus) -> None:
    """A run without a store, of which a record waits."""
    made = Description("offline", "r50-lars-g512-4w", {}, {})
    LocalRun("offline-7", made, 1_700_000_000_000, is_stored=False, status=status, ended=1_700_000_000_005).write(
        folder
    )
    writer = RunWriter(TrackedRun("", "offline-7"), driver_journal(folder))
    writer.tags({"attempt": "1"})
    writer.close()


def test_a_failed_run_without_mlflow_is_written_with_one_command(
    mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_offline(tmp_path / "offline-7", "KILLED")
    assert cli.execute(["sync", "--output", str(tmp_path)]) == 0
    (run_folder,) = (
        path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "mlruns"
    )
    run = MlflowClient(mlflow_store).get_run(run_folder.name)
    assert (run.info.status, run.data.tags["attempt"]) == ("KILLED", "1")
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"run {run_folder.name} (was offline-7): killed"
    assert last == f"1 runs of {tmp_path} written to {mlflow_store}"
    assert cli.execute(["sync", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"0 runs of {tmp_path} written to {mlflow_store}\n"


def test_runs_behind_a_url_are_written_with_the_same_command(
    mlflow_store: str,
    s3_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, logged = RemotePath(s3_folder), []
    make_offline(tmp_path / "offline-7", "TRAINED")
    publish(tmp_path / "offline-7", output / "offline-7")
    output.folder.write("offline-7/checkpoints/step-00000004.npz", b"weights")
    output.folder.write("notes/mine.txt", b"no run")

    def log(folder: Path, run: TrackedRun, checkpoint: AnyPath | None, checkpoints: AnyPath) -> str:
        logged.append(sorted(path.name for path in checkpoints.glob("step-*")))
        return f"runs:/{run.run_id}/model"

    monkeypatch.setattr("jobs.sync.log_model_of", log)
    assert cli.execute(["sync", "--output", s3_folder]) == 0
    first, model, last = capsys.readouterr().out.splitlines()
    run_id = first.split()[1]
    assert first == f"run {run_id} (was offline-7): finished"
    assert model == f"model runs:/{run_id}/model"
    assert last == f"1 runs of {s3_folder} written to {mlflow_store}"
    assert logged == [["step-00000004.npz"]]
    run = MlflowClient(mlflow_store).get_run(run_id)
    assert (run.info.status, run.data.tags["attempt"]) == ("FINISHED", "1")
    # It has the store's name there too, from which it is resumed and exported.
    of_run = {f"{run_id}/checkpoints/step-00000004.npz", f"{run_id}/run.json"}
    assert set(output.folder.files()) == {*of_run, "notes/mine.txt"}
    assert cli.execute(["sync", "--output", s3_folder]) == 0
    assert capsys.readouterr().out == f"0 runs of {s3_folder} written to {mlflow_store}\n"
    assert cli.execute(["sync", "--output", s3_folder, "--run", "0123"]) == 2
    assert f"there is no run 0123 under {s3_folder}" in capsys.readouterr().err


def test_a_run_behind_a_url_is_continued_with_the_store(mlflow_store: str, s3_folder: str, tmp_path: Path) -> None:
    make_offline(tmp_path / "offline-7", "KILLED")
    publish(tmp_path / "offline-7", RemotePath(s3_folder) / "offline-7")
    config = load("smoke", [f"training.output={s3_folder}", "training.resume_run=offline-7"])
    run_id = with_stored_run(config).training.resume_run
    assert MlflowClient(mlflow_store).get_run(str(run_id)).info.run_name == "r50-lars-g512-4w"
    assert RemotePath(s3_folder).folder.names() == [run_id]
    resumed = config.model_copy(update={"training": config.training.model_copy(update={"resume_run": run_id})})
    assert with_stored_run(resumed) == resumed


def test_a_run_that_is_trained_is_left_out_where_files_cannot_be_locked(
    mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("training.held_run", "tracking.local_run"):
        monkeypatch.setattr(f"pipelines.{module}.takes_whole_files_only", lambda folder: True)
    make_offline(tmp_path / "offline-7", "RUNNING")
    with held_run(tmp_path / "offline-7"):
        assert cli.execute(["sync", "--output", str(tmp_path)]) == 0
        left_out, last = capsys.readouterr().out.splitlines()
        assert left_out.startswith("run offline-7: left out: another job is writing ")
        assert last == f"0 runs of {tmp_path} written to {mlflow_store}"
        assert cli.execute(["sync", "--output", str(tmp_path), "--run", "offline-7"]) == 2
        assert "another job is writing" in capsys.readouterr().err
        kept = read_local_run(tmp_path / "offline-7")
        assert kept is not None
        assert kept.status == "RUNNING"
    assert cli.execute(["sync", "--output", str(tmp_path)]) == 0
    assert ": failed" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", '{"run_id": "a"', "[]", '{"description": 1}'])
def test_a_damaged_file_of_a_run_does_not_stop_the_others(
    content: str, mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        make_offline(tmp_path / name, "KILLED")
    (tmp_path / "first" / "run.json").write_text(content)
    assert cli.execute(["sync", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert f"run first: not written: {tmp_path}/first/run.json is damaged" in printed.out
    assert f"1 runs of {tmp_path} could not be written, 1 were" in printed.err
    assert (tmp_path / "first" / "run.json").read_text() == content


def test_a_run_that_the_store_has_deleted_does_not_stop_the_others(
    mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, status in (("first", "RUNNING"), ("second", "KILLED")):
        make_offline(tmp_path / name, status)
    first = adopt(tmp_path / "first")[0].run_id
    MlflowClient(mlflow_store).delete_run(first)
    (tmp_path / "first").unlink()
    (tmp_path / first).rename(tmp_path / "1")  # written before the other one
    update_local_run(tmp_path / "1", run_id=first)
    kept = sorted((tmp_path / "1").rglob("*.jsonl"))
    assert kept
    for _ in range(2):
        assert cli.execute(["sync", "--output", str(tmp_path)]) == 2
        printed = capsys.readouterr()
        assert "run 1: not written: " in printed.out
        assert f"1 runs of {tmp_path} could not be written" in printed.err
        assert (
            f"shows no run {first}: it is in another store than MLFLOW_TRACKING_URI names, was deleted" in printed.out
        )
        assert sorted((tmp_path / "1").rglob("*.jsonl")) == kept
    (run,) = MlflowClient(mlflow_store).search_runs([MlflowClient(mlflow_store).get_run(first).info.experiment_id])
    assert run.info.status == "KILLED"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("there is no checkpoint in /runs/first/checkpoints"),
        MissingPackageError("the model of a checkpoint needs tensorflow, which is not installed: pip install it"),
    ],
)
def test_a_model_that_cannot_be_made_does_not_stop_the_others(
    error: Exception,
    mlflow_store: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses: dict[str, LocalStatus] = {"first": "TRAINED", "second": "KILLED"}
    for name, status in statuses.items():
        make_offline(tmp_path / name, status)
        update_local_run(tmp_path / name, run_id=f"offline-{name}")

    def refuse(folder: Path, run: TrackedRun) -> str:
        raise error

    monkeypatch.setattr("jobs.sync.log_model_of", refuse)
    assert cli.execute(["sync", "--output", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert f"run first: not written: {error}" in printed.out
    assert "(was second): killed" in printed.out
    assert f"1 runs of {tmp_path} could not be written, 1 were" in printed.err
    first = read_local_run(tmp_path / "first")
    assert first is not None
    assert first.status == "TRAINED", "a further call logs the model"


def test_a_storage_that_is_away_ends_the_command(
    mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, run: TrackedRun) -> str:
        raise StorageError("the storage is away")

    monkeypatch.setattr("jobs.sync.log_model_of", refuse)
    make_offline(tmp_path / "offline-7", "TRAINED")
    assert cli.execute(["sync", "--output", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert "the storage is away" in printed.err
    assert "not written" not in printed.out


def test_what_is_not_there_is_one_line(mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["sync", "--output", str(tmp_path / "nowhere")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert cli.execute(["sync", "--output", str(tmp_path), "--run", "0123"]) == 2
    assert f"there is no run 0123 under {tmp_path}" in capsys.readouterr().err
    assert cli.execute(["export", "--output", str(tmp_path), "--run", "0123"]) == 2
    assert f"there is no run 0123 under {tmp_path}" in capsys.readouterr().err
    assert cli.execute(["export"]) == 2
    assert "--run ID is missing" in capsys.readouterr().err
