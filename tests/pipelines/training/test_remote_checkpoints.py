"""Checkpoints in an object store: written whole, verified, listed, pruned, and read from elsewhere."""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from conf.load import load
from pipelines.remote_path import RemotePath, fetch, publish
from pipelines.storage import Folder, StorageError
from pipelines.training.checkpoint import (
    RankStates,
    TrainingState,
    check_rank_states,
    newest_state,
    readable_checkpoints,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.checkpoint_files import check_writable, list_checkpoints
from pipelines.training.checks import check_output
from pipelines.training.held_run import held_run
from pipelines.training.output import RankJournal, publish_records, records_folder, run_place


def state(step: int) -> TrainingState:
    return TrainingState(1, step, 0, 16, "run", "data", [{"train/loss": 0.5}], exchange_ranks=2)


@pytest.fixture
def folder(s3_folder: str) -> RemotePath:
    return RemotePath(s3_folder) / "run" / "checkpoints"


def save(folder: RemotePath, step: int, variables: list[keras.Variable], spared: int | None = None) -> None:
    for rank in range(2):
        save_rank_state(folder, step, rank, {"residual": np.full(3, step + rank, np.float32)})
    check_rank_states(folder, step, 2)
    save_checkpoint(folder, state(step), variables, spared=spared)


def test_they_are_as_on_a_disk(folder: RemotePath, tiny_model: keras.Model) -> None:
    variables = tiny_model.variables
    before = [np.array(variable) for variable in variables]
    with pytest.raises(FileNotFoundError, match="no checkpoints in s3://"):
        newest_state(folder)
    check_writable(folder)
    with pytest.raises(RuntimeError, match="rank 0 wrote elsewhere than s3://"):
        check_rank_states(folder, 4, 2)
    for step in (4, 8, 12):
        save(folder, step, variables, spared=4)
    save(folder, 16, variables)
    assert [path.name for path in list_checkpoints(folder)] == ["step-00000012.npz", "step-00000016.npz"]
    assert folder.folder.names() == [
        f"step-000000{step}{part}.npz" for step in (12, 16) for part in ("", ".rank-00000", ".rank-00001")
    ]
    path, found = newest_state(folder)
    assert (str(path), found) == (f"{folder}/step-00000016.npz", state(16))
    _, _, arrays = next(readable_checkpoints(folder))
    for old, array in zip(before, arrays.values(), strict=True):
        np.testing.assert_array_equal(old, array)
    assert [list(part["residual"]) for part in RankStates(path, 2)] == [[16] * 3, [17] * 3]


def test_a_damaged_one_is_passed_over(
    folder: RemotePath, tiny_model: keras.Model, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 8):
        save(folder, step, tiny_model.variables)
    whole = folder.folder.read("step-00000008.npz")
    folder.folder.write("step-00000008.npz", whole[: len(whole) // 2])
    assert [found.step for _, found, _ in readable_checkpoints(folder)] == [4]
    assert "step-00000008.npz is damaged" in caplog.text


def test_nothing_is_left_of_one_that_arrives_changed(
    folder: RemotePath, tiny_model: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Folder._upload

    def damaging(self: Folder, source: Path, target: str) -> None:
        data = bytearray(source.read_bytes())
        data[100] ^= 1
        source.write_bytes(data)
        upload(self, source, target)
        data[100] ^= 1
        source.write_bytes(data)

    monkeypatch.setattr(Folder, "_upload", damaging)
    with pytest.raises(OSError, match="what was read back differs from what was written"):
        save_checkpoint(folder, state(4), tiny_model.variables)
    assert folder.folder.names() == []


@pytest.mark.parametrize("damaged", [False, True])
def test_without_an_md5_sum_the_file_is_read_back(
    damaged: bool, s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"checkpoint" * 1000)
    place = Folder(s3_folder)
    kind = type(place._filesystem)
    info = kind.info
    monkeypatch.setattr(kind, "info", lambda *args, **options: {**info(*args, **options), "ETag": '"of-parts-2"'})
    upload = Folder._upload

    def changing(self: Folder, source: Path, target: str) -> None:
        upload(self, source, target)
        file.write_bytes(b"CHECKPOINT" * 1000)

    if damaged:
        monkeypatch.setattr(Folder, "_upload", changing)
        with pytest.raises(OSError, match="what was read back differs"):
            place.put(file, "name")
    else:
        place.put(file, "name")
    assert place.exists("name") is not damaged


def test_a_bucket_that_is_not_there_is_said_before_training(s3: str) -> None:
    config = load("smoke", ["training.output=s3://absent-bucket/runs"])
    with pytest.raises(StorageError, match=r"s3://absent-bucket/runs: there is no s3://absent-bucket; make it"):
        check_output(config)


def test_records_are_copied_there_and_back(s3_folder: str, tmp_path: Path) -> None:
    place, ours, theirs = RemotePath(s3_folder) / "run", tmp_path / "ours", tmp_path / "theirs"
    place.folder.write("checkpoints/step-00000004.npz", b"kept")
    (ours / "journal" / "driver").mkdir(parents=True)
    (ours / "journal" / "driver" / "entries.jsonl").write_text("a")
    (ours / "run.json").write_text("{}")
    publish(ours, place, mirrors="journal")
    place.folder.write("notes.txt", b"somebody's own")
    (ours / "journal" / "driver" / "entries.jsonl").unlink()
    (ours / "run.json").write_text('{"status": "FINISHED"}')
    publish(ours, place, mirrors="journal")
    assert sorted(place.folder.files()) == ["checkpoints/step-00000004.npz", "notes.txt", "run.json"]
    fetch(place, theirs, without="checkpoints")
    assert (theirs / "run.json").read_text() == '{"status": "FINISHED"}'


def test_a_journal_that_was_not_fetched_stays_after_a_failure(s3_folder: str) -> None:
    config = load("smoke", [f"training.output={s3_folder}"])
    records, place = records_folder(s3_folder) / "run", run_place(config, "run")
    assert isinstance(place, RemotePath)
    place.folder.write("journal/rank-0/entries.jsonl", b"points")
    place.folder.write("journal/driver/entries.jsonl", b"delivered since")
    records.mkdir()
    (records / "run.json").write_text("{}")
    publish_records(config, "run", failed=True)
    assert sorted(place.folder.files()) == ["journal/rank-0/entries.jsonl", "run.json"]
    publish_records(config, "run")  # rank 0's was fetched and delivered
    assert sorted(place.folder.files()) == ["run.json"]


def test_two_drivers_cannot_train_one_run(s3_folder: str) -> None:
    place = RemotePath(s3_folder) / "run"
    with held_run(place) as check:
        check()
        (name,) = place.folder.names("checkpoints")
        with pytest.raises(ValueError, match=r"another job is writing s3://.*/run \(process \d+ on .*, seen \d+ s ago"):
            ExitStack().enter_context(held_run(place))
        place.folder.remove(f"checkpoints/{name}")  # as a driver does that took this one for dead
        with pytest.raises(RuntimeError, match="another job took over"):
            check()
    with held_run(place):  # it ends with its block
        pass
    assert place.folder.names("checkpoints") == []


def test_storage_that_takes_whole_files_only_has_a_lease_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.training.held_run.takes_whole_files_only", lambda folder: True)
    with (
        held_run(tmp_path / "run"),
        pytest.raises(ValueError, match="another job is writing"),
        held_run(tmp_path / "run"),
    ):
        pass
    assert list((tmp_path / "run").rglob("*.json")) == []


def test_the_journal_of_rank_0_is_continued_elsewhere(folder: RemotePath) -> None:
    first = RankJournal(folder)
    first.folder.mkdir(parents=True)
    (first.folder / "entries.jsonl").write_text("a")
    first.publish()
    second = RankJournal(folder)
    assert second.folder != first.folder
    assert (second.folder / "entries.jsonl").read_text() == "a"
    (second.folder / "entries.jsonl").unlink()
    second.publish()
    third = RankJournal(folder)
    assert not list(third.folder.glob("*"))


def test_the_history_of_a_saved_state_survives(folder: RemotePath, tiny_model: keras.Model) -> None:
    history: list[dict[str, Any]] = [{"train/loss": 0.5, "val/f1_micro": 0.25}]
    save_checkpoint(folder, dataclasses.replace(state(4), history=history), tiny_model.variables)
    assert newest_state(folder)[1].history == history
