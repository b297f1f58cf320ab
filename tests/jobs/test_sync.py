"""`groundswell sync` as it is typed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from conf.load import load
from jobs.shell import cli
from pipelines.machine.packages import MissingPackageError
from pipelines.storage.copies import publish
from pipelines.storage.folder import Location, StorageError
from pipelines.tracking.journal.journal import driver_journal
from pipelines.tracking.journal.local_run import Description, LocalRun, LocalStatus, read_local_run, update_local_run
from pipelines.tracking.journal.sync import adopt
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.driver.output import locked_run
from pipelines.training.driver.resumable import with_stored_run


def make_offline(folder: Path, status: LocalStatus) -> None:
    """A run without a store, of which a record waits."""
    made = Description("offline", "r50-lars-g512-4w", {}, {})
    LocalRun("offline-7", made, 1_700_000_000_000, is_stored=False, status=status, ended=1_700_000_000_005).write(
        folder
    )
    writer = RunWriter(TrackedRun("", "offline-7"), driver_journal(folder))
    writer.tags({"attempt": "1"})
    writer.close()


Sync = Callable[..., str]


@pytest.fixture
def sync(mlflow_store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sync:
    """Runs the verb on a folder or URL, `tmp_path` else: what it prints to both streams."""

    def run(*arguments: str, output: str | Path = tmp_path, code: int = 0) -> str:
        assert cli.execute(["sync", "--output", str(output), *arguments]) == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def test_a_failed_run_without_mlflow_is_written_with_one_command(sync: Sync, mlflow_store: str, tmp_path: Path) -> None:
    make_offline(tmp_path / "offline-7", "KILLED")
    printed = sync()
    (run_folder,) = (
        path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "mlruns"
    )
    run = MlflowClient(mlflow_store).get_run(run_folder.name)
    assert (run.info.status, run.data.tags["attempt"]) == ("KILLED", "1")
    written = f" of {tmp_path} written to {mlflow_store}\n"
    assert (printed, sync()) == (f"run {run_folder.name} (was offline-7): killed\n1 run{written}", f"0 runs{written}")


def test_runs_behind_a_url_are_written_with_the_same_command(
    sync: Sync, mlflow_store: str, s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, logged = Location(s3_folder), []
    make_offline(tmp_path / "offline-7", "TRAINED")
    publish(tmp_path / "offline-7", output / "offline-7")
    output.write("offline-7/checkpoints/step-00000004.npz", b"weights")
    output.write("notes/mine.txt", b"no run")

    def log(folder: Path, run: TrackedRun, checkpoint: Location | None, checkpoints: Location) -> str:
        logged.append(sorted(path.name for path in checkpoints.glob("step-*")))
        return f"runs:/{run.run_id}/model"

    monkeypatch.setattr("jobs.sync.log_model_of", log)
    printed, written = sync(output=s3_folder), f" of {s3_folder} written to {mlflow_store}\n"
    run_id = printed.split()[1]
    assert (printed, logged) == (
        f"run {run_id} (was offline-7): finished\nmodel runs:/{run_id}/model\n1 run{written}",
        [["step-00000004.npz"]],
    )
    run = MlflowClient(mlflow_store).get_run(run_id)
    assert (run.info.status, run.data.tags["attempt"]) == ("FINISHED", "1")
    # It has the store's name there too, from which it is resumed and exported.
    of_run = {f"{run_id}/checkpoints/step-00000004.npz", f"{run_id}/run.json"}
    assert (set(output.files()), sync(output=s3_folder)) == ({*of_run, "notes/mine.txt"}, f"0 runs{written}")
    assert f"there is no run 0123 under {s3_folder}" in sync("--run", "0123", output=s3_folder, code=2)


def test_a_run_behind_a_url_is_continued_with_the_store(mlflow_store: str, s3_folder: str, tmp_path: Path) -> None:
    make_offline(tmp_path / "offline-7", "KILLED")
    publish(tmp_path / "offline-7", Location(s3_folder) / "offline-7")
    config = load("smoke", [f"training.output={s3_folder}", "training.resume_run=offline-7"])
    run_id = with_stored_run(config).training.resume_run
    assert (MlflowClient(mlflow_store).get_run(str(run_id)).info.run_name, Location(s3_folder).names()) == (
        "r50-lars-g512-4w",
        [run_id],
    )
    resumed = config.model_copy(update={"training": config.training.model_copy(update={"resume_run": run_id})})
    assert with_stored_run(resumed) == resumed


def test_a_run_that_is_trained_is_left_out_where_files_cannot_be_locked(
    sync: Sync, mlflow_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("training.driver.output", "tracking.journal.local_run"):
        monkeypatch.setattr(f"pipelines.{module}.takes_whole_files_only", lambda folder: True)
    make_offline(tmp_path / "offline-7", "RUNNING")
    with locked_run(Location.at(tmp_path / "offline-7")):
        left_out, last = sync().splitlines()
        assert left_out.startswith("run offline-7: left out: another job is writing ")
        assert last == f"0 runs of {tmp_path} written to {mlflow_store}"
        assert "another job is writing" in sync("--run", "offline-7", code=2)
        assert read_local_run(tmp_path / "offline-7").status == "RUNNING"
    assert ": failed" in sync()


def test_records_of_a_run_without_its_file_are_not_passed_over(sync: Sync, s3_folder: str, tmp_path: Path) -> None:
    make_offline(tmp_path / "lost", "KILLED")
    (tmp_path / "lost" / "run.json").unlink()
    assert f"run lost: not written: {tmp_path}/lost has no run.json" in sync(code=2)
    assert list((tmp_path / "lost").rglob("*.jsonl")), "the records wait"
    publish(tmp_path / "lost", Location(s3_folder) / "lost")
    assert "run lost: not written: " in sync(output=s3_folder, code=2)


@pytest.mark.parametrize("content", ["", '{"run_id": "a"', "[]", '{"description": 1}'])
def test_a_damaged_file_of_a_run_does_not_stop_the_others(content: str, sync: Sync, tmp_path: Path) -> None:
    for name in ("first", "second"):
        make_offline(tmp_path / name, "KILLED")
    (tmp_path / "first" / "run.json").write_text(content)
    printed = sync(code=2)
    assert f"run first: not written: {tmp_path}/first/run.json is damaged" in printed
    assert f"1 runs of {tmp_path} could not be written, 1 were" in printed
    assert (tmp_path / "first" / "run.json").read_text() == content


def test_a_run_that_the_store_has_deleted_does_not_stop_the_others(
    sync: Sync, mlflow_store: str, tmp_path: Path
) -> None:
    for name, status in (("first", "RUNNING"), ("second", "KILLED")):
        make_offline(tmp_path / name, status)
    first, client = adopt(tmp_path / "first")[0].run_id, MlflowClient(mlflow_store)
    client.delete_run(first)
    (tmp_path / "first").unlink()
    (tmp_path / first).rename(tmp_path / "1")  # written before the other one
    update_local_run(tmp_path / "1", run_id=first)
    kept = sorted((tmp_path / "1").rglob("*.jsonl"))
    assert kept
    reason = f"shows no run {first}: it is in another store than MLFLOW_TRACKING_URI names, was deleted"
    for _ in range(2):
        printed = sync(code=2)
        assert [
            part
            for part in ("run 1: not written: ", f"1 runs of {tmp_path} could not be written", reason)
            if part not in printed
        ] == []
        assert sorted((tmp_path / "1").rglob("*.jsonl")) == kept
    (run,) = client.search_runs([client.get_run(first).info.experiment_id])
    assert run.info.status == "KILLED"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError("there is no checkpoint in /runs/first/checkpoints"), 2),
        (
            MissingPackageError("the model of a checkpoint needs tensorflow, which is not installed: pip install it"),
            2,
        ),
        (StorageError("the storage is away"), 4),
    ],
)
def test_a_model_that_cannot_be_made_does_not_stop_the_others_but_a_storage_that_is_away_does(
    error: Exception, code: int, sync: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, run: TrackedRun) -> str:
        raise error

    monkeypatch.setattr("jobs.sync.log_model_of", refuse)
    statuses: dict[str, LocalStatus] = {"first": "TRAINED", "second": "KILLED"}
    for name, status in statuses.items():
        make_offline(tmp_path / name, status)
        update_local_run(tmp_path / name, run_id=f"offline-{name}")
    printed = sync(code=code)
    assert str(error) in printed
    assert [
        part in printed
        for part in (f"run first: not written: {error}", "(was second): killed", "could not be written, 1 were")
    ] == [code == 2] * 3
    assert read_local_run(tmp_path / "first").status == "TRAINED", "a further call logs the model"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sync --output FOLDER/nowhere", "there is no folder"),
        ("sync --output FOLDER --run 0123", "there is no run 0123 under FOLDER"),
        ("export --output FOLDER --run 0123", "there is no run 0123 under FOLDER"),
        ("export", "--run ID is missing"),
    ],
)
def test_what_is_not_there_is_one_line(
    command: str, message: str, mlflow_store: str, tmp_path: Path, error_line: Callable[..., str]
) -> None:
    assert message.replace("FOLDER", str(tmp_path)) in error_line(*command.replace("FOLDER", str(tmp_path)).split())
