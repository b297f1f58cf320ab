"""The folder of predictions: its finished parts, its identity, and the file that completes it.

A part is a Parquet file, written atomically, and a marker that describes it. `predictions.json` is written last: a
folder without it is not finished. The process may be killed after every step.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from pipelines.archives.archive import REJECTED_SCHEMA
from pipelines.machine.json_text import parse_json
from pipelines.scoring.source import Part, Source
from pipelines.storage.folder import Location
from pipelines.storage.inventory import (
    MARK_FILE,
    complete_files,
    differences,
    final_name,
    is_lease,
    markers_in,
    progress_pattern,
    read_markers,
    refuse_foreign,
)
from pipelines.storage.lease import PROGRESS_FOLDER

FILE_NAME = "predictions.json"
REJECTED_FILE = "_rejected.parquet"
"""List of rejected samples. Readers that search folders for Parquet files skip names with a leading underscore."""
FORMAT_VERSION = 1
NOT_FINITE = "probabilities are not finite"
"""Reason of a rejected sample that was readable."""
CONVERTED_FILE, ACCEPTANCE_FILE = "_converted_model.zip", "_converted_model.json"
"""The model that OpenVINO runs, and its comparison with Keras: a job that continues uses the same model."""
DELTA_LOG_FILE = "_delta_log/00000000000000000000.json"
"""The first and only version of the predictions' Delta table, if the user asked for one."""
_REJECTED_SCHEMA = REJECTED_SCHEMA.append(pa.field("part", pa.string(), nullable=False))
_TOP = (FILE_NAME, REJECTED_FILE, CONVERTED_FILE, ACCEPTANCE_FILE, DELTA_LOG_FILE)
_PART = r"[^/_][^/]*-part-[0-9]{5,}\.parquet"
_NAMES = re.compile("|".join([*map(re.escape, _TOP), _PART, progress_pattern(r"[^/]+\.parquet\.json")]))
_log = logging.getLogger(__name__)

Identity = dict[str, Any]
"""Values that decide the predictions: model, input and settings."""


@dataclass(frozen=True)
class WrittenPart:
    """Result of scoring one part."""

    file: str
    rows: int
    """Number of predictions in the file."""
    size: int
    """Size of the file in bytes."""
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""
    computed_by: str
    """Runtime, and the processor features that it used."""
    sizes_digest: str | None = None
    """`Part.digest_of_sizes` of the readable samples; None if no size is known."""

    @property
    def unread(self) -> list[str]:
        """Ids of the samples that could not be read."""
        return [row["id"] for row in self.rejected if row["reason"] != NOT_FINITE]

    @property
    def samples(self) -> int:
        """Number of samples that were read or rejected."""
        return self.rows + len(self.rejected)


_WRITTEN_PART = TypeAdapter(WrittenPart)


def note_name(file: str, *, earlier: bool = False) -> str:
    """Return the path of a part's marker; `earlier`: of the marker for a part that is scored again."""
    return f"{PROGRESS_FOLDER}/{'earlier-' * earlier}{file}.json"


def write_note(part: WrittenPart, output: Location, *, earlier: bool = False) -> None:
    """Write the marker of a finished part, or of one that is scored again (`earlier`)."""
    output.write(note_name(part.file, earlier=earlier), json.dumps(asdict(part)).encode())


def remove_notes(output: Location, files: Collection[str]) -> None:
    """Remove the markers of parts that are no longer finished."""
    for name in markers_in(output) & {note_name(file) for file in files}:
        output.remove(name)


def check_ours(output: Location) -> None:
    """Make sure that a folder holds only predictions, finished or not.

    Raises:
        ValueError: It is a file, holds another file, or does not say whose predictions it holds; the message names it.
    """
    if output.is_local and output.path.exists() and not output.path.is_dir():
        raise ValueError(f"--output {output} is a file: give a folder")
    names = sorted(output.files())
    advice = "no predictions: choose an empty or new folder"
    refuse_foreign(f"--output {output}", names, lambda name: bool(_NAMES.fullmatch(name)), advice)
    parts = [name for name in names if not name.startswith(f"{PROGRESS_FOLDER}/")]
    if parts and not {FILE_NAME, MARK_FILE} & {*names}:
        raise ValueError(
            f"--output {output} holds {parts[0]} and no {FILE_NAME}, which would name the model of its "
            "predictions: choose an empty or new folder"
        )


def read_identity(output: Location) -> Identity | None:
    """Read the model, input and settings of a folder's predictions; None for a new folder.

    Raises:
        ValueError: Their description is damaged.
    """
    for name in (FILE_NAME, MARK_FILE):
        try:
            return dict(parse_json(output.read(name))["identity"])
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{output}/{name} is damaged ({error!r}): remove {output} if it is yours") from None
    return None


def refuse_another(existing: Identity, identity: Identity, output: Location) -> None:
    """Make sure that predictions are continued with the same model, input and settings.

    Raises:
        ValueError: They differ; the message names the differences.
    """
    found = differences(existing, identity)
    if found:
        raise ValueError(f"--output {output} holds other predictions ({'; '.join(found)}): choose another --output")


def begin(output: Location, identity: Identity) -> None:
    """Mark a folder as ours before anything else is written to it."""
    output.make(PROGRESS_FOLDER)
    output.write(MARK_FILE, json.dumps({"identity": identity}).encode())


def is_complete(output: Location, files: Collection[str]) -> bool:
    """Return whether predictions are finished, and all their files exist with their recorded size."""
    if not output.exists(FILE_NAME):
        return False
    return {part.file for part in _of_manifest(output)} == set(files) == set(find_written(output, files))


def find_written(output: Location, files: Collection[str]) -> dict[str, WrittenPart]:
    """Find the finished parts, by file: those with a marker, and with the size in it."""
    return _whole([*_of_manifest(output), *_notes(output, files)], output, files)


def find_earlier(output: Location, files: Collection[str]) -> dict[str, WrittenPart]:
    """Find the parts that a job was about to score again and has not replaced."""
    return _whole(_notes(output, files, earlier=True), output, files)


def _notes(output: Location, files: Collection[str], *, earlier: bool = False) -> list[WrittenPart]:
    markers = {file: note_name(file, earlier=earlier) for file in files}
    return [*read_markers(output, markers, _WRITTEN_PART.validate_json).values()]


def _whole(parts: Iterable[WrittenPart], output: Location, files: Collection[str]) -> dict[str, WrittenPart]:
    """Return the parts whose file has the recorded size; of two with the same file, the later one."""
    found = {part.file: part for part in parts if part.file in files}
    whole = complete_files(output, {file: part.size for file, part in found.items()})
    return {file: part for file, part in found.items() if file in whole}


def _of_manifest(output: Location) -> list[WrittenPart]:
    """Return the parts that a finished folder lists, with their rejected samples."""
    try:
        parts = parse_json(output.read(FILE_NAME))["parts"]
        by_part: dict[str, list[dict[str, str]]] = {}
        for row in pq.read_table(pa.BufferReader(output.read(REJECTED_FILE))).to_pylist():
            by_part.setdefault(row.pop("part"), []).append(row)
        return [_WRITTEN_PART.validate_python({**part, "rejected": by_part.get(part["file"], [])}) for part in parts]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return []


def outdated_parts(source: Source, found: Mapping[str, WrittenPart]) -> set[str]:
    """Return the finished parts to score again: a rejected sample is readable now, or another one's file was replaced.

    A part keeps its predictions if files of some of its samples are missing, because these would be lost.
    """
    outdated = set()
    for part in source.parts:
        written = found.get(part.file)
        if written is None or not (
            was_replaced(part, written) or (written.unread and part.can_read_any(written.unread))
        ):
            continue
        lost = [row for row in part.unusable if row["id"] not in written.unread]
        if lost:
            _log.warning(
                "%s is not scored again, as samples of it would be lost: %d cannot be read any more, such as %s (%s)",
                *(part.file, len(lost), lost[0]["id"], lost[0]["reason"]),
            )
        else:
            outdated.add(part.file)
    return outdated


def was_replaced(part: Part, written: WrittenPart) -> bool:
    """Return whether the file of a scored sample has another size now."""
    before = written.sizes_digest
    return before is not None and part.digest_of_sizes(written.unread) != before


def read_back(output: Location, files: Sequence[str]) -> list[WrittenPart]:
    """Read the markers of all parts from storage, in order.

    A task may have reported another attempt than the one that wrote the file, with another size.

    Raises:
        RuntimeError: A file has another size than its marker says, or one of the two is missing.
    """
    found = find_written(output, files)
    others = [file for file in files if file not in found]
    if others:
        raise RuntimeError(
            f"{output}: another job or task has written {len(others)} parts at the same time, the first is "
            f"{others[0]}: the same command continues, and scores them again"
        )
    return [found[file] for file in files]


def write_rejected(
    output: Location, parts: Sequence[WrittenPart], others: Iterable[dict[str, str]]
) -> list[dict[str, str]]:
    """Write the list of rejected samples, and return it.

    Args:
        output: Folder of the predictions.
        parts: All parts, in order.
        others: Rows of `REJECTED_SCHEMA` that belong to no part.
    """
    rows = [{**row, "part": ""} for row in others]
    rows += [{**row, "part": part.file} for part in parts for row in part.rejected]
    with output.new_file(REJECTED_FILE) as path:
        pq.write_table(pa.Table.from_pylist(rows, schema=_REJECTED_SCHEMA), path)
    return rows


def finish(
    output: Location, identity: Identity, parts: Sequence[WrittenPart], rejected: int, described: dict[str, Any]
) -> None:
    """Write `predictions.json` after everything else, then remove the markers.

    Args:
        output: Folder of the predictions.
        identity: Identity with which the output was started.
        parts: All parts, in order.
        rejected: Number of rejected samples, which are already listed.
        described: Further content of `predictions.json`.
    """
    values = {
        "format_version": FORMAT_VERSION,
        "identity": identity,
        **described,
        "predictions": sum(part.rows for part in parts),
        "rejected": rejected,
        "parts": [
            {name: value for name, value in asdict(part).items() if name != "rejected" and value is not None}
            for part in parts
        ],
    }
    output.write(FILE_NAME, json.dumps(values, indent=1).encode())
    clean_up(output, {part.file for part in parts})


def clean_up(output: Location, files: Collection[str]) -> None:
    """Remove the files that only a running job needs, and those that killed attempts left."""
    for name in output.files():
        is_note = name.startswith(f"{PROGRESS_FOLDER}/") and not is_lease(name)
        if is_note or (final_name(name) != name and final_name(name) in {*files, *_TOP}):
            output.remove(name)
    if output.is_local and not output.names(PROGRESS_FOLDER):
        output.remove(PROGRESS_FOLDER)
