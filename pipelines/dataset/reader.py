"""Samples of one split, in an order that is a pure function of (rows, seed, epoch).

Step `s` of an epoch takes rows `s*G .. (s+1)*G` of the epoch's permutation (G: global batch size); rank r of N takes
the r-th part of them. Every rank has the same number of steps, and (epoch, step) is the whole state.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.mapped import MappedShard
from pipelines.dataset.rows import fixed_fields
from pipelines.dataset.schema import ID_FIELD, LABEL_FIELD

BATCHES_IN_FLIGHT = 2


@dataclass(frozen=True)
class Batch:
    """Samples side by side; `weights` is 0 where a row only pads the last batch of an evaluation."""

    images: dict[str, NDArray[np.generic]]
    """By image group, `(batch, height, width, bands)` in the stored dtype."""
    targets: NDArray[np.uint8]
    """Multi-hot, `(batch, classes)`."""
    weights: NDArray[np.float32]
    """`(batch,)`, 1 or 0."""


class SplitReader:
    """Random access to the rows of one split, gathered from memory-mapped Parquet."""

    def __init__(self, dataset: Path, split: str) -> None:
        """Open and check every shard of the split.

        Raises:
            FileNotFoundError: No such dataset, or a shard is missing.
            ValueError: No such split, or a shard is not what the manifest says.
        """
        manifest = read_manifest(dataset)
        self.manifest: Manifest = manifest
        if split not in manifest.splits:
            raise ValueError(f"{dataset} has no split {split!r}, only {', '.join(sorted(manifest.splits))}")
        self._fields = fixed_fields(manifest.groups, len(manifest.class_names))
        self._shards = [
            MappedShard(dataset / shard.file, shard, self._fields) for shard in manifest.splits[split].shards
        ]
        row_groups = [
            (number, group, rows)
            for number, shard in enumerate(manifest.splits[split].shards)
            for group, rows in enumerate(shard.row_groups)
        ]
        self._places = [(shard, group) for shard, group, _ in row_groups]
        self._first_rows = np.cumsum([0] + [rows for _, _, rows in row_groups])

    def __len__(self) -> int:
        """Rows of the split."""
        return int(self._first_rows[-1])

    def gather(self, rows: NDArray[np.int64], size: int | None = None) -> Batch:
        """Copy the given rows, in this order, into a new batch; padded with its first row up to `size`."""
        size = size or len(rows)
        padded = np.concatenate([rows, np.full(size - len(rows), rows[0])])
        groups = np.searchsorted(self._first_rows, padded, side="right") - 1
        values = {name: np.empty((size, *shape), dtype) for name, (shape, dtype) in self._fields.items()}
        flat = {name: array.reshape(size, -1).view(np.uint8) for name, array in values.items()}
        for place, (row, group) in enumerate(zip(padded.tolist(), groups.tolist(), strict=True)):
            shard, number = self._places[group]
            columns = self._shards[shard].columns
            for name, out in flat.items():
                columns[name][number].copy_row(row - int(self._first_rows[group]), out[place])
        targets = values.pop(LABEL_FIELD).view(np.uint8)
        weights = (np.arange(size) < len(rows)).astype(np.float32)
        return Batch(values, targets, weights)

    def ids(self) -> list[str]:
        """Ids of all rows, in row order."""
        return [
            sample
            for shard in self._shards
            for sample in pq.read_table(shard.path, columns=[ID_FIELD])[ID_FIELD].to_pylist()
        ]


def epoch_order(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The permutation of all rows in one epoch."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """Whole global batches in one epoch; the tail differs from epoch to epoch."""
    return rows // global_batch_size


def training_batches(
    reader: SplitReader,
    *,
    seed: int,
    epoch: int,
    global_batch_size: int,
    rank: int = 0,
    size: int = 1,
    start_step: int = 0,
) -> Iterator[Batch]:
    """Yield this rank's part of each global batch of one epoch, from `start_step` on.

    Raises:
        ValueError: `size` does not divide `global_batch_size`.
    """
    if global_batch_size % size:
        raise ValueError(f"a global batch of {global_batch_size} does not divide among {size} ranks")
    order = epoch_order(len(reader), seed, epoch)
    part = global_batch_size // size
    starts = [
        step * global_batch_size + rank * part
        for step in range(start_step, steps_per_epoch(len(reader), global_batch_size))
    ]
    return _prefetched((order[start : start + part] for start in starts), reader, part)


def evaluation_batches(reader: SplitReader, *, batch_size: int, rank: int = 0, size: int = 1) -> Iterator[Batch]:
    """Yield this rank's rows, each row of the split on exactly one rank; the last batch is padded with weight 0."""
    rows = np.array_split(np.arange(len(reader)), size)[rank]
    return _prefetched(
        (rows[start : start + batch_size] for start in range(0, len(rows), batch_size)), reader, batch_size
    )


def _prefetched(parts: Iterator[NDArray[np.int64]], reader: SplitReader, batch_size: int) -> Iterator[Batch]:
    """Gather `BATCHES_IN_FLIGHT` batches ahead on one thread, which ends when the consumer does."""
    batches: queue.Queue[Batch | BaseException | None] = queue.Queue(BATCHES_IN_FLIGHT)
    stopped = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                batches.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for rows in parts:
                if stopped.is_set():
                    return
                put(reader.gather(rows, batch_size))
            put(None)
        except BaseException as error:  # raised again in the consumer
            put(error)

    threading.Thread(target=produce, name="groundswell-reader", daemon=True).start()
    try:
        while (item := batches.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
