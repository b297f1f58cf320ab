"""The whole log of every rank, a file each, on the driver."""

from pathlib import Path
from types import TracebackType
from typing import TextIO


class RankLogs:
    """Appends each line to `<folder>/rank-<n>.log`."""

    def __init__(self, folder: Path) -> None:
        """Files are made as ranks speak."""
        self._folder = folder
        self._files: dict[int, TextIO] = {}

    def write(self, rank: int, line: str) -> None:
        """Take one line of one rank."""
        if rank not in self._files:
            self._files[rank] = (self._folder / f"rank-{rank}.log").open("a", buffering=1)
        self._files[rank].write(line + "\n")

    def __enter__(self) -> "RankLogs":
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
