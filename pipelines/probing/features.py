"""The features of a model on a dataset, as Parquet files: their identity, their completeness and their rows.

Each pair of a model and a dataset has its own folder, whose name is a digest of both. Files appear atomically, and
`features.json` is written last. Features without this file are not finished, and only an extraction reads them.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.format.manifest import Manifest
from pipelines.machine.json_text import parse_json
from pipelines.scoring.predict.model import ModelDescription
from pipelines.storage.folder import Location
from pipelines.storage.inventory import complete_files, final_name

FILE_NAME = "features.json"
FORMAT_VERSION = 1

Identity = dict[str, Any]
"""The facts that determine the features: the model, the dataset and the bands."""

_NUMBERS = pa.list_(pa.field("item", pa.float32(), nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("features", _NUMBERS, nullable=False),
        pa.field("probabilities", _NUMBERS, nullable=False),
        pa.field("targets", pa.list_(pa.field("item", pa.uint8(), nullable=False)), nullable=False),
    ]
)
"""Columns of the features: the input of the model's head, its own probabilities, and the labels (multi-hot)."""


@dataclass(frozen=True)
class FeatureFile:
    """One finished file."""

    file: str
    split: str
    rows: int
    size: int
    """Bytes of the file."""


@dataclass(frozen=True)
class Features:
    """The finished features; the object is small and picklable, because it is sent to the ranks."""

    folder: Location
    files: tuple[FeatureFile, ...]
    """Files of all splits; the files of a split are in the order of the dataset's rows."""

    def rows(self, split: str) -> int:
        """Return the number of samples of a split."""
        return sum(file.rows for file in self.files if file.split == split)

    def read(self, split: str, columns: Sequence[str], start: int = 0, stop: int | None = None) -> Iterator[pa.Table]:
        """Read some rows of a split in order, at most one row group at a time.

        Args:
            split: Name of the split.
            columns: Names of the columns.
            start: First row.
            stop: Row after the last one; None: all rows to the end.

        Raises:
            OSError, RuntimeError: The storage cannot be used.
        """
        stop = self.rows(split) if stop is None else stop
        first = 0
        for part in [file for file in self.files if file.split == split]:
            if first < stop and start < first + part.rows:
                yield from self._read_file(part.file, columns, start - first, stop - first)
            first += part.rows

    def _read_file(self, name: str, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
        with self.folder.open(name) as file, pq.ParquetFile(file) as parquet:
            first = 0
            for number in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(number).num_rows
                begin, end = max(start - first, 0), min(stop - first, rows)
                if begin < end:
                    yield parquet.read_row_group(number, columns=list(columns)).slice(begin, end - begin)
                first += rows

    def array(self, split: str, column: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Read one column of lists as an array `(rows, numbers of a list)`; without rows `(0, 0)`."""
        found = [as_array(table[column]) for table in self.read(split, [column], start, stop)]
        return (
            np.concatenate(found) if found else np.zeros((0, 0), SCHEMA.field(column).type.value_type.to_pandas_dtype())
        )


def as_array(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column of lists of equal length as an array `(rows, numbers of a list)`."""
    values: NDArray[Any] = pa.concat_arrays(column.chunks).flatten().to_numpy(zero_copy_only=False)
    return values.reshape(len(column), -1)


def identity_of(model: ModelDescription, file: bytes, manifest: Manifest) -> Identity:
    """Return the facts that determine the features of a model on a dataset.

    Args:
        model: Inputs and outputs of the model.
        file: Content of its `.keras` file: the same weights under another name give the same features.
        manifest: The dataset.
    """
    bands = {group.name: list(group.bands) for group in manifest.groups}
    return {
        "format_version": FORMAT_VERSION,
        "model_sha256": hashlib.sha256(file).hexdigest(),
        "dataset_fingerprint": manifest.fingerprint,
        "bands": {each.name: bands[each.name] for each in model.inputs},
    }


def folder_of(output: Location, identity: Identity) -> Location:
    """Return the folder of some features, inside the folder of all features."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return output / digest[:16]


def find_features(folder: Location, identity: Identity, files: Collection[str]) -> Features | None:
    """Find finished features; return None if they are unfinished, of another identity, or lack a file."""
    try:
        described = parse_json(folder.read(FILE_NAME))
        found = Features(folder, tuple(FeatureFile(**file) for file in described["files"]))
        is_same = described["identity"] == identity and {file.file for file in found.files} == {*files}
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    sizes = {file.file: file.size for file in found.files}
    return found if is_same and complete_files(folder, sizes) == {*files} else None


def finish(folder: Location, identity: Identity, files: Sequence[FeatureFile]) -> Features:
    """Mark features as finished."""
    values = {"identity": identity, "files": [asdict(file) for file in files]}
    folder.write(FILE_NAME, json.dumps(values, indent=1).encode())
    clean_up(folder, [file.file for file in files])
    return Features(folder, tuple(files))


def clean_up(folder: Location, files: Collection[str]) -> None:
    """Remove the incomplete files that killed jobs left; the caller holds the folder."""
    for name in folder.names():
        if final_name(name) != name and final_name(name) in {*files, FILE_NAME}:
            folder.remove(name)
