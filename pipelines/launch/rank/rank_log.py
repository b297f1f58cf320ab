"""The output of a rank on the disk of its host, until the driver has it."""

import os
import re
import tempfile

LAST_LINES = 50
_LAST_LINES_BYTES = LAST_LINES * 400
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MAXIMUM_LINE_BYTES = 1 << 14


class RankLog:
    """The whole output of a rank on its host's disk; the rank's process writes directly to the file.

    The file has no name, so it disappears when the last process that has it open ends.
    """

    def __init__(self) -> None:
        """Create the file."""
        # The append mode lets a rank and its children all write.
        self.file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115  open as long as this object
        self._finished = False

    def size(self) -> int:
        """Return the number of bytes written so far."""
        return os.fstat(self.file.fileno()).st_size

    def write(self, text: str) -> None:
        """Append text of the launcher."""
        self.file.write(text.encode())

    def finish(self) -> None:
        """Count a last line without an end as a line, because the writers are gone."""
        self._finished = True

    def read(self, offset: int, limit: int) -> tuple[list[str], int]:
        """Return whole lines from a byte offset, about `limit` bytes at most, and the offset after them.

        A carriage return also ends a line, because progress bars use it. A line of more than 16 KiB is cut.
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
        """Return the last lines of the output, 50 at most."""
        start = max(0, self.size() - _LAST_LINES_BYTES)
        return self.read(start, _LAST_LINES_BYTES)[0][-LAST_LINES:]

    def close(self) -> None:
        """Close the file."""
        self.file.close()
