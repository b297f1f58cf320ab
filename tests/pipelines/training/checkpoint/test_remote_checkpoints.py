"""Checkpoints in an object store: written whole, verified, listed, pruned, and read from elsewhere."""

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import pytest

from conf.load import load
from pipelines.storage.copies import fetch, publish
from pipelines.storage.folder import Location, StorageError
from pipelines.tracking.journal.journal import Entry, Journal
from pipelines.training.checkpoint.files import check_writable, list_checkpoints
from pipelines.training.checkpoint.state import (
    RankStates,
    TrainingState,
    check_rank_states,
    newest_state,
    read_checkpoint,
    readable,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.driver.checks import check_output
from pipelines.training.driver.output import RankJournal, locked_run, publish_records, records_folder, run_location
from pipelines.training.driver.remote_runs import unsynced_behind


def state(step: int) -> TrainingState:
    return TrainingState(1, step, 0, 16, "run", "data", [{"train/loss": 0.5}], exchange_ranks=2)


@pytest.fixture
def place(s3_folder: str) -> Location:
    """A run's folder in the store."""
    return Location(s3_folder) / "run"


@pytest.fixture
def folder(place: Location) -> Location:
    return place / "checkpoints"


@pytest.fixture
def filesystem(s3: str) -> Any:
    """fsspec's, by which every folder of this process reads and writes the store."""
    return fsspec.filesystem("s3")


def save(folder: Location, step: int, variables: list[keras.Variable], spared: int | None = None) -> None:
    for rank in range(2):
        save_rank_state(folder, step, rank, {"residual": np.full(3, step + rank, np.float32)})
    check_rank_states(folder, step, 2)
    save_checkpoint(folder, state(step), variables, spared=spared)


def test_they_are_as_on_a_disk(folder: Location) -> None:
    variable = keras.Variable(np.arange(6.0, dtype=np.float32), name="weight")
    with pytest.raises(FileNotFoundError, match="no checkpoints in s3://"):
        newest_state(folder)
    check_writable(folder)
    with pytest.raises(RuntimeError, match="rank 0 wrote elsewhere than s3://"):
        check_rank_states(folder, 4, 2)
    for step, spared in ((4, 4), (8, 4), (12, 4), (16, None)):
        save(folder, step, [variable], spared)
    assert ([path.name for path in list_checkpoints(folder)], folder.names()) == (
        ["step-00000012.npz", "step-00000016.npz"],
        [f"step-000000{step}{part}.npz" for step in (12, 16) for part in ("", ".rank-00000", ".rank-00001")],
    )
    path, found = newest_state(folder)
    assert (str(path), found) == (f"{folder}/step-00000016.npz", state(16))
    _, (_, arrays) = next(readable(folder, read_checkpoint))
    np.testing.assert_equal([*arrays.values()], [np.array(variable)])
    assert [list(part["residual"]) for part in RankStates(path, 2)] == [[16] * 3, [17] * 3]


def test_nothing_is_left_of_one_that_arrives_changed(
    folder: Location, filesystem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaging(source: str, target: str) -> None:
        data = bytearray(Path(source).read_bytes())
        data[100] ^= 1
        filesystem.pipe_file(target, bytes(data))

    monkeypatch.setattr(filesystem, "put_file", damaging)
    with pytest.raises(OSError, match="what was read back differs from what was written"):
        save_checkpoint(folder, state(4), [])
    assert folder.names() == []


@pytest.mark.parametrize("arrives", [b"checkpoint", b"CHECKPOINT"])
def test_without_an_md5_sum_the_file_is_read_back(
    arrives: bytes, s3_folder: str, filesystem: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, place, info = tmp_path / "file", Location(s3_folder), filesystem.info
    file.write_bytes(b"checkpoint" * 1000)
    tags = iter(['"of-parts-2"'])  # to the first question, whether it has arrived; s3fs reads by the true one

    def of_parts(*arguments: Any, **more: Any) -> dict[str, Any]:
        found = info(*arguments, **more)
        return {**found, "ETag": next(tags, found["ETag"])}

    monkeypatch.setattr(filesystem, "info", of_parts)
    monkeypatch.setattr(filesystem, "put_file", lambda source, target: filesystem.pipe_file(target, arrives * 1000))
    damaged = arrives == b"CHECKPOINT"
    with pytest.raises(OSError, match="what was read back differs") if damaged else nullcontext():
        place.put(file, "name")
    assert (place.exists("name"), next(tags, "asked")) == (not damaged, "asked")


def test_a_bucket_that_is_not_there_is_said_before_training(s3: str) -> None:
    config = load("smoke", ["training.output=s3://absent-bucket/runs"])
    with pytest.raises(StorageError, match=r"s3://absent-bucket/runs: there is no s3://absent-bucket; make it"):
        check_output(config.training, config.dataset.path)


def test_records_are_copied_there_and_back(place: Location, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    place.write("checkpoints/step-00000004.npz", b"kept")
    entries, described = ours / "journal" / "driver" / "entries.jsonl", ours / "run.json"
    entries.parent.mkdir(parents=True)
    entries.write_text("a")
    described.write_text("{}")
    publish(ours, place, mirrors="journal")
    place.write("notes.txt", b"somebody's own")
    entries.unlink()
    described.write_text('{"status": "FINISHED"}')
    publish(ours, place, mirrors="journal")
    assert sorted(place.files()) == ["checkpoints/step-00000004.npz", "notes.txt", "run.json"]
    fetch(place, theirs, without="checkpoints")
    assert (theirs / "run.json").read_text() == '{"status": "FINISHED"}'
    place.write("../../escaped", b"of another user")
    with pytest.raises(ValueError, match=r"has a file '\.\./\.\./escaped', whose name leads out of this folder"):
        fetch(place, theirs)
    place.parent.write("../run.json", b"{}")
    assert unsynced_behind(place.parent) == [place]


def test_a_journal_that_was_not_fetched_stays_after_a_failure(s3_folder: str, place: Location) -> None:
    assert run_location(s3_folder, "run") == place
    for writer in ("rank-0", "driver"):
        place.write(f"journal/{writer}/entries.jsonl", b"points")
    records = records_folder(s3_folder) / "run"
    records.mkdir()
    (records / "run.json").write_text("{}")
    publish_records(s3_folder, "run", failed=True)
    assert sorted(place.files()) == ["journal/rank-0/entries.jsonl", "run.json"]
    publish_records(s3_folder, "run")  # rank 0's was fetched and delivered
    assert sorted(place.files()) == ["run.json"]


def test_two_drivers_cannot_train_one_run(place: Location) -> None:
    with locked_run(place) as check:
        check()
        (name,) = place.names("checkpoints")
        with pytest.raises(ValueError, match=r"another job is writing s3://.*/run \(process \d+ on .*, seen \d+ s ago"):
            ExitStack().enter_context(locked_run(place))
        place.remove(f"checkpoints/{name}")  # as a driver does that took this one for dead
        with pytest.raises(RuntimeError, match="another job took over"):
            check()
    with locked_run(place):  # it ends with its block
        pass
    assert place.names("checkpoints") == []


def test_storage_that_takes_whole_files_only_has_a_lease_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.training.driver.output.takes_whole_files_only", lambda folder: True)
    with (
        locked_run(Location.at(tmp_path / "run")),
        pytest.raises(ValueError, match="another job is writing"),
        locked_run(Location.at(tmp_path / "run")),
    ):
        pass
    assert list((tmp_path / "run").rglob("*.json")) == []


def test_the_journal_of_rank_0_is_continued_elsewhere_and_what_mlflow_refused_is_copied(folder: Location) -> None:
    first, of_driver = RankJournal(folder), folder.parent / "refused"
    of_driver.write("report.html", b"driver")
    refused = Journal(first.folder).refused_as(Entry(0, "file", 0, "trace.json"))
    assert refused is not None
    (first.folder / "entries.jsonl").write_text("a")
    refused.parent.mkdir()
    refused.write_text("rank")
    first.publish()
    assert [of_driver.read(name) for name in of_driver.names()] == [b"driver", b"rank"]
    second = RankJournal(folder)
    assert (second.folder == first.folder, (second.folder / "entries.jsonl").read_text()) == (False, "a")
    (second.folder / "entries.jsonl").unlink()
    second.publish()
    assert not list(RankJournal(folder).folder.glob("*"))
