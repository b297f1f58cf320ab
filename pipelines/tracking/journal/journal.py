"""The journal of writes to a run, stored on disk in order until the store has accepted them."""

import errno
import json
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from pipelines.machine.json_text import parse_json
from pipelines.storage.locations import is_inside
from pipelines.storage.whole_files import (
    copy_folder,
    refuse_link,
    remove_if_empty,
    sync_to_disk,
    takes_whole_files_only,
)

Kind = Literal["metrics", "tags", "file", "folder"]
_LINES = "entries.jsonl"
_FILES = "files"
LONG_BYTES = 1 << 20
"""Size at which a journal is rewritten without its delivered entries: every checkpoint may copy it."""


def journals(run_folder: Path) -> Path:
    """Return the folder of all journals of a run, beside its checkpoints."""
    return run_folder / "journal"


def driver_journal(run_folder: Path) -> Path:
    """Return the folder of the driver's journal."""
    return journals(run_folder) / "driver"


def rank_journal(run_folder: Path) -> Path:
    """Return the folder of rank 0's journal."""
    return journals(run_folder) / "rank-0"


@dataclass(frozen=True)
class Entry:
    """One write to the store."""

    number: int
    """Number of the entry; it rises by one with each entry."""
    kind: Kind
    after_step: int
    """Optimizer steps that a checkpoint must contain before the entry is delivered."""
    path: str
    """Path of an artifact; empty for other kinds."""


class Journal:
    """A folder with one file of lines; each line is an entry or a change of the state of entries.

    An entry is delivered only after a checkpoint contains its steps. Otherwise training that restarts from an older
    checkpoint would repeat these steps and write them twice. Opening a journal again continues it; an incomplete line
    of a dead process is left out. Several threads may use one journal, but not several processes.

    On storage that accepts only whole files, the journal is a local folder. It is copied there before and after each
    checkpoint and at the end. A process that dies loses the entries since the last copy, and also their steps.
    """

    def __init__(self, folder: Path, restart_step: int | None = None) -> None:
        """Open or create a journal.

        Args:
            folder: Folder of the journal.
            restart_step: Optimizer steps of the checkpoint from which training starts or continues: entries about
                later steps are dropped. None: nothing is dropped.

        Raises:
            ValueError: An entry names a file or folder that is not of this run, or the journal contains a link. Whoever
                can write into a run's folder could otherwise let another user upload and remove files.
        """
        for part in (folder.parent, folder, folder / _FILES, folder / _LINES):
            refuse_link(part, "journal")
        self._copy = folder if takes_whole_files_only(folder) else None
        self.folder = folder if self._copy is None else Path(tempfile.mkdtemp(prefix="groundswell-journal-"))
        if self._copy is not None and self._copy.is_dir():
            shutil.copytree(self._copy, self.folder, dirs_exist_ok=True)
        self._lock = threading.RLock()  # methods under it call each other
        self.changed = threading.Condition(self._lock)  # there are new entries, or more may be delivered
        self._pending: deque[Entry] = deque()
        self._places: dict[int, tuple[int, int]] = {}  # offset and bytes of each entry's line
        self._next_number = 0
        self._checkpoint_step = 0
        self._unsynced: list[Path] = []  # files of entries since the last `sync`
        (self.folder / _FILES).mkdir(parents=True, exist_ok=True)
        lines = self._read_lines()
        if restart_step is not None:
            self._checkpoint_step = restart_step
            lines = [line for line in lines if parse_json(line)["after_step"] <= restart_step]
        self._file = self._begin(lines)

    def append(self, kind: Kind, content: Mapping[str, Any], *, after_step: int, path: str = "") -> None:
        """Add an entry; it survives the death of this process, and after `sync` also that of the machine.

        Raises:
            OSError: The disk is full or cannot be written; the text names the journal.
        """
        line = {"kind": kind, "after_step": after_step, "path": path, "content": dict(content)}
        with self._lock:
            self._places[self._next_number] = self._write({"entry": self._next_number, **line})
            self._pending.append(Entry(self._next_number, kind, after_step, path))
            self._next_number += 1
            self.changed.notify_all()

    def append_file(self, data: bytes, path: str, *, after_step: int) -> None:
        """Add an entry that writes an artifact.

        Raises:
            OSError: The same as in `append`.
        """
        with self._lock:
            name = f"{self._next_number}/{Path(path).name}"  # MLflow names an artifact after its file
            file = self.folder / _FILES / name
            try:
                file.parent.mkdir()
                file.write_bytes(data)
                self._unsynced.append(file)
                self.append("file", {"file": name}, after_step=after_step, path=path)
            except OSError as error:
                shutil.rmtree(file.parent, ignore_errors=True)  # the next entry gets the same number
                raise OSError(error.errno, error.strerror, str(self.folder)) from error

    def sync(self) -> None:
        """Wait until all entries so far are on the disk; they must be there before the checkpoint of their steps.

        Raises:
            OSError: The disk cannot be written.
        """
        with self._lock:
            files, self._unsynced = self._unsynced, []
        for path in [path for file in files for path in (file, file.parent)] + [self.folder / _FILES] * bool(files):
            with suppress(FileNotFoundError):  # already delivered
                sync_to_disk(path)
        os.fsync(self._file.fileno())
        with self._lock:
            if self._copy is not None:
                copy_folder(self.folder, self._copy)

    def checkpointed(self, step: int) -> None:
        """Record that a checkpoint contains `step` optimizer steps: entries about them may be delivered."""
        with self._lock:
            self._checkpoint_step = max(self._checkpoint_step, step)
            self._shorten()
            self._write({"held": self._checkpoint_step})
            self.changed.notify_all()
            if self._copy is not None:
                copy_folder(self.folder, self._copy)

    def next(self) -> Entry | None:
        """Return the oldest entry that may be delivered; None if there is none."""
        with self._lock:
            first = self._pending[0] if self._pending else None
            return first if first is not None and first.after_step <= self._checkpoint_step else None

    def __len__(self) -> int:
        """Return the number of entries that were not delivered."""
        with self._lock:
            return len(self._pending)

    def content(self, entry: Entry) -> dict[str, Any]:
        """Return the content of an entry."""
        with self._lock:
            return dict(parse_json(self._line(entry))["content"])

    def _line(self, entry: Entry) -> bytes:
        """Return the line of an entry, without its end."""
        offset, size = self._places[entry.number]
        return os.pread(self._file.fileno(), size, offset)[:-1]

    def file_of(self, content: Mapping[str, Any]) -> Path:
        """Return the path of the file that an entry writes as an artifact."""
        return self.folder / _FILES / str(content["file"])

    def place_of(self, folder: Path) -> str:
        """Return how an entry names a folder of the run, whose files it writes: by its path in the run's folder.

        The run's folder may have another location at delivery, even on another machine.
        """
        return str(folder.absolute().relative_to(self._run_folder.absolute()))

    def folder_of(self, content: Mapping[str, Any]) -> Path:
        """Return the folder whose files an entry writes."""
        return self._run_folder / str(content["folder"])

    @property
    def _run_folder(self) -> Path:
        return (self._copy or self.folder).parent.parent

    def is_replaced(self, entry: Entry) -> bool:
        """Return whether a later entry that may be delivered writes the same artifact."""
        with self._lock:
            return entry.kind in ("file", "folder") and any(
                later.path == entry.path and later.kind == entry.kind and later.after_step <= self._checkpoint_step
                for later in self._pending
                if later.number > entry.number
            )

    def refused_as(self, entry: Entry) -> Path | None:
        """Return the place in the run's folder for a file that the store refuses; None: there is no such folder."""
        place = (self._copy or self.folder).resolve()
        kept = place.parent.parent / "refused" / entry.path
        is_of_a_run = entry.kind == "file" and place.parent.name == journals(Path()).name
        return kept if is_of_a_run and is_inside(entry.path) and kept.resolve() == kept else None

    def delivered(self, entry: Entry, keep_as: Path | None = None) -> None:
        """Remove the oldest entry, which the store has accepted, or refuses: then its file may be kept elsewhere."""
        # All steps are inside the lock: a thread that sees an empty journal may close it at once.
        with self._lock:
            first = self._pending.popleft()
            assert first == entry, (first, entry)
            with suppress(
                OSError, ValueError
            ):  # a full disk or a closed file: the entry is delivered again, which is harmless
                if entry.kind == "file":
                    if keep_as is not None:
                        keep_as.parent.mkdir(parents=True, exist_ok=True)
                        shutil.move(self.file_of(self.content(entry)), keep_as)
                    shutil.rmtree(self.file_of(self.content(entry)).parent, ignore_errors=True)
                self._write({"delivered": entry.number})
            self._places.pop(entry.number, None)

    def close(self) -> None:
        """Close the journal, and remove it if it is empty."""
        with self._lock:
            self._file.close()
            if not self._pending:
                (self.folder / _LINES).unlink(missing_ok=True)
                remove_if_empty(self.folder / _FILES)
                remove_if_empty(self.folder)
            if self._copy is not None:
                copy_folder(self.folder, self._copy)
                shutil.rmtree(self.folder, ignore_errors=True)
                if not self._pending:
                    remove_if_empty(self._copy)

    def _shorten(self) -> None:
        """Remove delivered entries if they are most of a long file."""
        size = self._file.seek(0, os.SEEK_END)
        if size < LONG_BYTES or 2 * sum(size for _, size in self._places.values()) > size:
            return
        with suppress(OSError):  # the disk is full: the long file is as good
            old, self._file = self._file, self._rewrite({entry.number: self._line(entry) for entry in self._pending})
            old.close()

    def _write(self, line: Mapping[str, Any]) -> tuple[int, int]:
        data = json.dumps(line).encode() + b"\n"
        offset = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(offset)
            raise OSError(error.errno, error.strerror, str(self.folder)) from error
        return offset, len(data)

    def _read_lines(self) -> list[bytes]:
        """Return the lines of the entries that were not delivered, and restore `_checkpoint_step`."""
        path = self.folder / _LINES
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a line without an end is incomplete
        entries: dict[int, bytes] = {}
        for line in lines:
            values = parse_json(line)
            if "entry" in values:
                entries[values["entry"]] = line
            elif "delivered" in values:
                entries.pop(values["delivered"], None)
            elif "held" in values:
                self._checkpoint_step = values["held"]
        return list(entries.values())

    def _begin(self, lines: list[bytes]) -> FileIO:
        """Make these entries the pending ones, and replace the old file by a file with them."""
        for line in lines:
            values = parse_json(line)
            entry = Entry(values["entry"], values["kind"], values["after_step"], values["path"])
            if not self._is_of_this_run(entry, values["content"]):
                named = f"{values['content'].get(entry.kind)!r}, which is no {entry.kind} of this run"
                raise ValueError(
                    f"{self.folder / _LINES}: entry {entry.number} names {named}: remove {self.folder} if another user "
                    "wrote it"
                )
            self._pending.append(entry)
        self._next_number = self._pending[-1].number + 1 if self._pending else 0
        waiting = {str(entry.number) for entry in self._pending if entry.kind == "file"}
        for folder in (self.folder / _FILES).iterdir():
            if folder.name not in waiting:
                shutil.rmtree(folder)
        return self._rewrite({entry.number: line for entry, line in zip(self._pending, lines, strict=True)})

    def _is_of_this_run(self, entry: Entry, content: Mapping[str, Any]) -> bool:
        """Return whether an entry names nothing but a file that `append_file` wrote, or a folder inside the run's."""
        if entry.kind not in ("file", "folder"):
            return True
        named = str(content.get(entry.kind))
        root = (self.folder / _FILES if entry.kind == "file" else self._run_folder).resolve()
        path = root / named
        if not is_inside(named) or path.resolve() != path:  # a link
            return False
        if entry.kind == "file":
            return path.relative_to(root).parts == (str(entry.number), path.name)
        return not any(inside.is_symlink() for inside in path.rglob("*"))

    def _rewrite(self, lines: Mapping[int, bytes]) -> FileIO:
        """Replace the old file by one with only these entries, by number, and open it."""
        temporary = self.folder / f".{_LINES}"
        places = {}
        with temporary.open("wb") as file:
            file.write(json.dumps({"held": self._checkpoint_step}).encode() + b"\n")
            for number, line in lines.items():
                places[number] = file.tell(), len(line) + 1
                file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / _LINES)
        self._places = places
        return (self.folder / _LINES).open("r+b", buffering=0)
