"""What ranks print: kept whole where they run, sent to the driver, written there to a file each, shown in part."""

import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

LAST_LINES = 50
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAXIMUM_LINE_BYTES = 1 << 14
_SHOWN_LINES_PER_SECOND = 200
_SHOWN_LINES_AT_ONCE = 2000


class Spool:
    """A rank's whole output on its host's disk: the worker writes straight to it, whoever may or may not read.

    The file has no name: nothing is left of it when the last process that has it open is gone.
    """

    def __init__(self) -> None:
        """Make the file."""
        # Appending, so that a worker and its children may all write.
        self.file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  open as long as the spool is
        self._finished = False

    def size(self) -> int:
        """Bytes written so far."""
        return os.fstat(self.file.fileno()).st_size

    def write(self, text: str) -> None:
        """Add text of our own."""
        self.file.write(text.encode())

    def finish(self) -> None:
        """The writers are gone: what has no line end is a line too."""
        self._finished = True

    def read(self, offset: int, limit: int) -> tuple[list[str], int]:
        """Whole lines from an offset on, at most about `limit` bytes of them, and the offset behind them.

        Progress bars end their lines with a carriage return; what ends with nothing at all is cut.
        """
        finished = self._finished
        data = os.pread(self.file.fileno(), limit, offset)
        *lines, rest = _LINE_END.split(data)
        end = offset + len(data) - len(rest)
        if rest and (len(rest) >= _MAXIMUM_LINE_BYTES or (finished and end + len(rest) >= self.size())):
            lines.append(rest)
            end += len(rest)
        pieces = (
            line[at : at + _MAXIMUM_LINE_BYTES] for line in lines for at in range(0, len(line), _MAXIMUM_LINE_BYTES)
        )
        return [piece.decode(errors="replace") for piece in pieces], end

    def last_lines(self) -> list[str]:
        """The end of the output."""
        start = max(0, self.size() - LAST_LINES * 400)
        return self.read(start, LAST_LINES * 400)[0][-LAST_LINES:]

    def close(self) -> None:
        """Let the file go."""
        self.file.close()


class RankLogs:
    """Appends each line to `<folder>/rank-<n>.log`."""

    def __init__(self, folder: Path) -> None:
        """Files are made as ranks speak."""
        self._folder = folder
        self._files: dict[int, TextIO] = {}

    def write(self, rank: int, lines: list[str]) -> None:
        """Take lines of one rank."""
        if rank not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[rank] = (self._folder / f"rank-{rank}.log").open("a", buffering=1)
        self._files[rank].writelines(line + "\n" for line in lines)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class Throttle:
    """Lets a rank's lines through, up to a rate; says how many it has held back."""

    def __init__(self, show: Callable[[int, str], None]) -> None:
        """Lines that are let through go to `show(rank, line)`."""
        self._show = show
        self._allowance: dict[int, float] = {}
        self._looked: dict[int, float] = {}
        self._held_back: dict[int, int] = {}

    def write(self, rank: int, lines: list[str]) -> None:
        """Take lines of one rank."""
        now = time.monotonic()
        grown = (now - self._looked.get(rank, now)) * _SHOWN_LINES_PER_SECOND
        allowance = min(_SHOWN_LINES_AT_ONCE, self._allowance.get(rank, _SHOWN_LINES_AT_ONCE) + grown)
        shown = lines[: int(allowance)]
        self._looked[rank], self._allowance[rank] = now, allowance - len(shown)
        if shown and self._held_back.get(rank):
            self._show(rank, f"[{self._held_back.pop(rank)} lines not shown: more than this can be read]")
        for line in shown:
            self._show(rank, line)
        self._held_back[rank] = self._held_back.get(rank, 0) + len(lines) - len(shown)

    def close(self) -> None:
        """Say what was held back at the end."""
        for rank, count in self._held_back.items():
            if count:
                self._show(rank, f"[{count} lines not shown: more than this can be read]")
