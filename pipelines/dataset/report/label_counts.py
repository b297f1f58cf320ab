"""Chooses the classes to show, and counts how often they occur together, using only the labels column."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.format.columns import LABEL_FIELD
from pipelines.dataset.format.manifest import Shard
from pipelines.dataset.format.rows import array_header
from pipelines.storage.folder import Location


def classes_by_frequency(counts: Sequence[int], limit: int) -> list[int]:
    """Return class indices, the most frequent first; of more than `limit`, half of the limit from each end."""
    order = sorted(range(len(counts)), key=lambda index: (-counts[index], index))
    if len(order) <= limit:
        return order
    return order[: limit // 2] + order[-(limit // 2) :]


def label_cooccurrence(
    dataset: Location | Path, shards: Sequence[Shard], class_count: int, classes: Sequence[int]
) -> NDArray[np.int64]:
    """Count the samples that have both of two classes, one row group at a time.

    Args:
        dataset: Folder of the dataset.
        shards: Shards to read.
        class_count: Length of a label vector.
        classes: The class indices to count, in the order of the result.

    Returns:
        `(len(classes), len(classes))`, symmetric; the diagonal holds the samples of each class.

    Raises:
        ValueError: A label is not a `uint8` vector of `class_count` values.
    """
    counts = np.zeros((len(classes), len(classes)), np.int64)
    for shard in shards:
        with Location.at(dataset).open(shard.file) as source, pq.ParquetFile(source) as file:
            for group in range(file.num_row_groups):
                for chunk in file.read_row_group(group, columns=[LABEL_FIELD])[LABEL_FIELD].chunks:
                    # Integer products do not use BLAS; single precision is exact below 2^24 samples.
                    labels = decode_labels(chunk, class_count)[:, classes].astype(np.float32)
                    counts += (labels.T @ labels).astype(np.int64)
    return counts


def decode_labels(column: pa.BinaryArray, class_count: int) -> NDArray[np.uint8]:
    """Return all encoded label vectors of `column` as `(rows, class_count)`, without work per row.

    Raises:
        ValueError: A value is not a `uint8` vector of `class_count` values.
    """
    header = np.frombuffer(array_header((class_count,), np.dtype(np.uint8)), np.uint8)
    if not len(column):
        return np.empty((0, class_count), np.uint8)
    _, offsets_buffer, values_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[column.offset : column.offset + len(column) + 1]
    width = len(header) + class_count
    if (np.diff(offsets) == width).all():
        rows = np.frombuffer(values_buffer, np.uint8)[offsets[0] : offsets[-1]].reshape(-1, width)
        if (rows[:, : len(header)] == header).all():
            return rows[:, len(header) :]
    raise ValueError(f"column {LABEL_FIELD!r} does not hold uint8 vectors of {class_count} values")
