"""Finished parts: which of them are scored again, and whether the storage holds what their tasks reported."""

import logging
from collections.abc import Mapping, Sequence

from pipelines.scoring.output.output import WrittenPart, find_written
from pipelines.scoring.parts import Part
from pipelines.scoring.source import Source
from pipelines.storage.folder import Location

_log = logging.getLogger(__name__)


def outdated_parts(source: Source, found: Mapping[str, WrittenPart]) -> set[str]:
    """Return the finished parts to score again: a rejected sample is readable now, or another one's file was replaced.

    A part keeps its predictions if files of some of its samples are missing, because these would be lost.
    """
    outdated = set()
    for part in source.parts:
        written = found.get(part.file)
        if written is None:
            continue
        if not was_replaced(part, written) and not (written.unread and part.can_read_any(written.unread)):
            continue
        lost = [row for row in part.unusable if row["id"] not in written.unread]
        if lost:
            _log.warning(
                "%s is not scored again, as samples of it would be lost: %d cannot be read any more, such as %s (%s)",
                *(part.file, len(lost), lost[0]["id"], lost[0]["reason"]),
            )
            continue
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
