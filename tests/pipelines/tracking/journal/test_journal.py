import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelines.tracking.journal.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "j")


def following(journal: Journal) -> Any:
    """The next entry, which there is."""
    entry = journal.next()
    assert entry is not None
    return entry


def taken(journal: Journal) -> list[object]:
    """Deliver everything that may be delivered; the contents in their order."""
    contents = []
    while (entry := journal.next()) is not None:
        contents.append(journal.content(entry)["tags"]["n"])
        journal.delivered(entry)
    return contents


def add(journal: Journal, *numbers: int, after_step: int = 0) -> None:
    for number in numbers:
        journal.append("tags", {"tags": {"n": number}}, after_step=after_step)


def test_entries_wait_for_the_checkpoint_that_holds_their_steps(journal: Journal) -> None:
    add(journal, 1)
    add(journal, 2, 3, after_step=8)
    add(journal, 4, after_step=16)
    assert taken(journal) == [1]
    journal.checkpointed(8)
    assert [taken(journal), taken(journal)] == [[2, 3], []]


def test_what_was_not_delivered_is_there_after_the_process_died(journal: Journal, tmp_path: Path) -> None:
    add(journal, 1, 2, 3, after_step=8)
    journal.checkpointed(8)
    journal.delivered(following(journal))
    # Not closed: the process was killed while it wrote a line.
    with (tmp_path / "j" / "entries.jsonl").open("ab") as file:
        file.write(b'{"entry": 3, "kind": "ta')
    again = Journal(tmp_path / "j")
    add(again, 4, after_step=8)
    assert taken(again) == [2, 3, 4]


def test_a_journal_that_is_closed_as_its_last_file_is_delivered_is_removed(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append_file(b"a picture", "curves.png", after_step=0)
    entry, remove = following(journal), shutil.rmtree

    def close_when_empty() -> None:
        while len(journal):
            pass
        journal.close()

    closing = threading.Thread(target=close_when_empty)

    def remove_late(path: Path, **settings: Any) -> None:
        closing.join(1)  # it may end the journal now, where nothing keeps it from doing so
        remove(path, **settings)

    monkeypatch.setattr(shutil, "rmtree", remove_late)
    closing.start()
    journal.delivered(entry)
    closing.join()
    assert not (tmp_path / "j").exists()


def test_a_file_that_arrives_after_the_journal_was_closed_is_no_error(journal: Journal, tmp_path: Path) -> None:
    journal.append_file(b"a picture", "curves.png", after_step=0)
    entry = following(journal)
    journal.close()  # while a request is on its way
    journal.delivered(entry)
    assert len(Journal(tmp_path / "j")) == 1, "it is delivered again"


def test_training_that_falls_back_drops_the_steps_that_it_repeats(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", restart_step=0)
    add(journal, 1, after_step=8)
    add(journal, 2, after_step=16)
    # The checkpoint of step 8 was written, and the process died before it could say so.
    again = Journal(tmp_path / "j", restart_step=8)
    assert taken(again) == [1]
    add(again, 3, after_step=16)
    again.checkpointed(16)
    assert taken(again) == [3]


def test_a_long_journal_is_written_anew_without_what_was_delivered(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.tracking.journal.journal.LONG_BYTES", 2000)
    file, sizes = tmp_path / "j" / "entries.jsonl", []
    for step in range(1, 41):
        add(journal, *range(10 * step, 10 * step + 10), after_step=step)
        journal.append_file(b"a picture", f"{step}.png", after_step=step + 1)
        journal.checkpointed(step)
        on_its_way = following(journal)
        content = journal.content(on_its_way)
        journal.checkpointed(step)
        assert journal.content(on_its_way) == content
        while (entry := journal.next()) is not None:
            assert "file" in (content := journal.content(entry)) or content["tags"]["n"] // 10 == step
            journal.delivered(entry)
        sizes.append(file.stat().st_size)
    assert max(sizes) < 6000
    assert sum(sizes) > 40 * 1000
    assert len(journal) == 1
    again = Journal(tmp_path / "j")
    again.checkpointed(41)
    entry = following(again)
    assert again.file_of(again.content(entry)).read_bytes() == b"a picture"


def test_files_are_kept_until_they_are_delivered(journal: Journal, tmp_path: Path) -> None:
    journal.append_file(b"old", "plots/a.png", after_step=0)
    journal.append_file(b"new", "plots/a.png", after_step=0)
    journal.append_file(b"later", "plots/a.png", after_step=8)
    again = Journal(tmp_path / "j")
    first = following(again)
    assert (again.is_replaced(first), again.file_of(again.content(first)).read_bytes()) == (True, b"old")
    again.delivered(first)
    second = following(again)
    assert (second.path, again.is_replaced(second)) == ("plots/a.png", False)
    file = again.file_of(again.content(second))
    assert (file.name, file.read_bytes()) == ("a.png", b"new")
    again.delivered(second)
    assert not file.exists()


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        *(("file", name) for name in ("{victim}/id_rsa", "../../../victim/id_rsa", "0/../../../../victim/id_rsa")),
        *(("file", name) for name in ("1/plot.png", "0", "0/a/b", "0/plot\0.png", "0/linked", "")),
        *(("folder", name) for name in ("{victim}", "..", "logs/../../victim", "linked", "linked/sub", "logs", "")),
    ],
)
def test_an_entry_of_somebody_else_uploads_and_removes_nothing(tmp_path: Path, kind: Any, named: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "run" / "journal" / "driver"
    for path in (victim, folder / "files" / "0", tmp_path / "run" / "logs"):
        path.mkdir(parents=True)
    (victim / "id_rsa").write_text("a key")
    for link in ("journal/driver/files/0/linked", "linked", "logs/rank-0.log"):
        (tmp_path / "run" / link).symlink_to(victim if link == "linked" else victim / "id_rsa")
    entry = {"entry": 0, "kind": kind, "after_step": 0, "path": "x", "content": {kind: named.format(victim=victim)}}
    (folder / "entries.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(ValueError, match=rf"entries\.jsonl: entry 0 names .* no {kind} of this run: remove {folder}"):
        Journal(folder)
    assert ((victim / "id_rsa").read_text(), (folder / "entries.jsonl").exists()) == ("a key", True)


@pytest.mark.parametrize(
    "linked", ["journal", "journal/driver", "journal/driver/files", "journal/driver/entries.jsonl"]
)
def test_a_journal_that_is_a_link_elsewhere_is_refused(tmp_path: Path, linked: str) -> None:
    (tmp_path / "victim" / "driver" / "files" / "photos").mkdir(parents=True)
    (tmp_path / "run" / linked).parent.mkdir(parents=True)
    (tmp_path / "run" / linked).symlink_to(tmp_path / "victim" / ("" if linked == "journal" else "driver/files"))
    with pytest.raises(ValueError, match=rf"{linked} is a link, which no journal contains: remove it"):
        Journal(tmp_path / "run" / "journal" / "driver")
    assert (tmp_path / "victim" / "driver" / "files" / "photos").is_dir()


def test_what_was_synced_outlives_the_machine(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []

    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink()))
    for name in ("a.png", "b.png", "c.png"):
        journal.append_file(b"x", f"plots/{name}", after_step=0)
    journal.delivered(following(journal))
    journal.sync()
    folder = tmp_path / "j" / "files"
    expected = [folder / "1" / "b.png", folder / "1", folder / "2" / "c.png", folder / "2", folder]
    assert synced == [*expected, tmp_path / "j" / "entries.jsonl"], "the lines after what they name"
    journal.sync()
    assert synced[len(expected) + 1 :] == [tmp_path / "j" / "entries.jsonl"]


def test_an_empty_journal_is_removed_and_a_strangers_file_is_not(journal: Journal, tmp_path: Path) -> None:
    add(journal, 1)
    journal.close()
    left = Journal(tmp_path / "j")
    assert taken(left) == [1]
    (tmp_path / "j" / "notes.txt").write_text("mine")
    left.close()
    assert [path.name for path in (tmp_path / "j").iterdir()] == ["notes.txt"]
    (tmp_path / "j" / "notes.txt").unlink()
    Journal(tmp_path / "j").close()
    assert not (tmp_path / "j").exists()


@contextmanager
def only_ten_bytes_left(folder: Path) -> Iterator[None]:
    """No file grows longer than the journal's lines and ten bytes: the next line does not fit whole."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "entries.jsonl").stat().st_size + 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_names_the_journal_and_spoils_nothing(journal: Journal, tmp_path: Path) -> None:
    add(journal, 1)
    with only_ten_bytes_left(tmp_path / "j"), pytest.raises(OSError, match=r"No space left on device.*/j"):
        add(journal, 2)
    add(journal, 3)
    assert taken(journal) == [1, 3]


@pytest.mark.parametrize("size", [1000, 1])  # of which the file does not fit, or only the line about it
def test_a_file_that_a_full_disk_did_not_take_leaves_its_place_to_the_next_one(
    journal: Journal, tmp_path: Path, size: int
) -> None:
    add(journal, 1)
    with only_ten_bytes_left(tmp_path / "j"), pytest.raises(OSError, match=r"No space left on device|File too large"):
        journal.append_file(b"x" * size, "picture.png", after_step=0)
    journal.append_file(b"whole", "table.json", after_step=0)
    files = [path for path in (tmp_path / "j" / "files").rglob("*") if path.is_file()]
    assert [(path.name, path.read_bytes()) for path in files] == [("table.json", b"whole")]
