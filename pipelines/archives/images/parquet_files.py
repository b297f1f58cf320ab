"""Finds the Parquet files of an archive and reads them row by row."""

import threading
from collections import OrderedDict
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.archives.files import join
from pipelines.archives.images.class_folders import list_folder, refuse_linked_folders
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

INCOMPLETE = "_groundswell_incomplete"
"""File that marks a folder while a DataFrame is written into it."""
_SUFFIX = ".parquet"
_DELTA_LOG, _ICEBERG_LOG, _ICEBERG_SUFFIX = "_delta_log", "metadata", ".metadata.json"
_DEPTH = 3
_OPEN_FILES = 64


def list_parquet_files(root: str) -> list[tuple[str, int]]:
    """List the Parquet files of a folder and its subfolders, by path: path relative to `root`, and size in bytes.

    Names that start with an underscore or a dot are skipped, because Spark writes its own files so.

    Args:
        root: Path or URL of a folder, or of one file, whose relative path is empty.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It has no Parquet files, or some are missing. Links that lead out of the folder, and files more
            than two levels deep, cannot be listed. Or a folder is a table whose log says which of its rows are valid.
    """
    size = Location(root).size() if root.endswith(_SUFFIX) else None
    if size is not None:
        return [("", size)]
    found = _list(root, "", _DEPTH)
    if not found:
        raise ValueError(f"{root}: holds no Parquet files, expected names that end with {_SUFFIX}")
    return sorted(found)


def _list(root: str, folder: str, depth: int) -> list[tuple[str, int]]:
    contents = list_folder(root, folder)
    if any(name == INCOMPLETE for name, _ in contents.files):
        raise ValueError(
            f"{root}: a DataFrame was not written into it to its end: remove the folder, and prepare it again"
        )
    prefix = f"{folder}/" if folder else ""
    kind = _kind_of_table(root, prefix, contents.folders)
    if kind is not None:
        raise ValueError(
            f"{join(root, folder)} is {kind} table, whose folder keeps removed rows: read it with Spark, and pass the "
            "DataFrame (`groundswell.prepare(config, table=frame)`) or write it as Parquet files"
        )
    refuse_linked_folders(root, contents.rejected)
    for row in contents.rejected:
        if row["id"].endswith(_SUFFIX):
            what = f"{row['reason']} {row['detail']}".strip()
            raise ValueError(f"{join(root, row['id'])}: {what}, which is not read: put the file itself there")
    found = [(f"{prefix}{name}", size) for name, size in contents.files if name.endswith(_SUFFIX) and name[0] != "_"]
    if found and depth == 0:
        raise ValueError(
            f"{join(root, found[0][0])}: lies deeper than {_DEPTH - 1} folders below the archive: name the folder "
            "above it as archive.root, or move it up"
        )
    for name in contents.folders if depth > 0 else []:
        if name[0] != "_":
            found += _list(root, f"{prefix}{name}", depth - 1)
    return found


def _kind_of_table(root: str, prefix: str, folders: list[str]) -> str | None:
    """Return the format of a table with a log: reading it without the log would include removed and old rows."""
    if _DELTA_LOG in folders:
        return "a Delta"
    files = list_folder(root, f"{prefix}{_ICEBERG_LOG}").files if _ICEBERG_LOG in folders else []
    return "an Iceberg" if any(name.endswith(_ICEBERG_SUFFIX) for name, _ in files) else None


class ParquetRows:
    """A reader of single values; it caches the row groups used last, up to half a GiB per process.

    A Parquet file has no position for a row: its whole row group is decoded. In random order, archives with row groups
    of some MiB are read fastest.
    """

    def __init__(self, cached_bytes: int = 1 << 29) -> None:
        """Create a reader; it caches read values of at most `cached_bytes` and one row group."""
        self._cached_bytes = cached_bytes
        self._lock = threading.Lock()
        self._files: OrderedDict[tuple[str, str], tuple[pq.ParquetFile, list[int]]] = OrderedDict()
        self._groups: OrderedDict[tuple[str, str, int, str], pa.ChunkedArray] = OrderedDict()

    def value(self, path: str, row: int, column: str, *, opened_as: str) -> Any:
        """Return one value as a Python object.

        Args:
            path: Path or URL of the file.
            row: Number of the row in the file.
            column: Name of a column.
            opened_as: Name of the reader; each reader opens the file itself, because the file may have been replaced.

        Raises:
            OSError, pa.ArrowException, LookupError: The file is missing or damaged, or has no such row.
        """
        with self._lock:  # several threads cannot use an open file
            opened = path, opened_as
            file, ends = self._opened(opened)
            group = next(number for number, end in enumerate(ends) if row < end)
            values = self._read(opened, file, group, column)
        return values[row - (ends[group - 1] if group else 0)].as_py()

    def _opened(self, opened: tuple[str, str]) -> tuple[pq.ParquetFile, list[int]]:
        if opened not in self._files:
            file = open_parquet(opened[0])
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            self._files[opened] = file, list(accumulate(group.num_rows for group in groups))
            while len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)[1][0].close()
        self._files.move_to_end(opened)
        return self._files[opened]

    def _read(self, opened: tuple[str, str], file: pq.ParquetFile, group: int, column: str) -> pa.ChunkedArray:
        key = *opened, group, column
        if key not in self._groups:
            self._groups[key] = file.read_row_group(group, columns=[column])[column]
            while len(self._groups) > 1 and sum(values.nbytes for values in self._groups.values()) > self._cached_bytes:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]


def open_parquet(path: str) -> pq.ParquetFile:
    """Open a Parquet file by its path or URL.

    Raises:
        OSError, pa.ArrowException: The file is missing, or is not a Parquet file.
    """
    return pq.ParquetFile(Location(path).open() if is_url(path) else path)


def path_of(root: str, file: str) -> str:
    """Return the path or URL of a listed file."""
    return join(root, file) if file else root
