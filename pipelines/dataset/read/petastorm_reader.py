"""Batches from Petastorm's own reader, for comparison and compatibility.

Its order depends on the number of ranks and threads. It distributes whole row groups, and cannot resume within an
epoch. All ranks do the same number of steps: a rank with fewer rows than others reads some of them twice per epoch.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipelines.dataset.format.columns import LABEL_FIELD
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import Batch
from pipelines.machine.packages import require
from pipelines.storage.folder import Location


def petastorm_batches(
    dataset: Location | Path | str,
    split: str,
    manifest: Manifest,
    *,
    seed: int,
    epoch: int,
    batch_size: int,
    steps: int,
    threads: int,
    rank: int = 0,
    size: int = 1,
) -> Iterator[Batch]:
    """Yield exactly `steps` batches of one rank.

    `Batch.rows` counts rows within the epoch. They are not positions in the split, which Petastorm does not report.

    Raises:
        ValueError: The dataset is not on a filesystem that Petastorm reads with this pyarrow.
        MissingPackageError: Petastorm is not installed.
    """
    folder = Location.at(dataset)
    if not folder.is_local:
        raise ValueError(f"Petastorm's reader reads local paths here, not {folder}: set reader.name=groundswell")
    require("reader.name=petastorm", ["petastorm"])
    from petastorm import make_reader

    names = [group.name for group in manifest.groups]
    with (
        warnings.catch_warnings(action="ignore", category=FutureWarning),  # pyarrow warns for each of Petastorm's calls
        make_reader(
            (folder.path / split).as_uri(),
            num_epochs=None,
            shuffle_row_groups=True,
            shuffle_rows=True,
            # With one seed every epoch would have the same order, and Petastorm ignores the seed 0.
            seed=int(np.random.default_rng([seed, epoch]).integers(1, 1 << 31)),
            cur_shard=rank,
            shard_count=size,
            workers_count=threads,
        ) as reader,
    ):
        for step in range(steps):
            rows = [next(reader) for _ in range(batch_size)]
            first = (step * size + rank) * batch_size
            yield Batch(
                {name: np.stack([getattr(row, name) for row in rows]) for name in names},
                np.stack([getattr(row, LABEL_FIELD) for row in rows]),
                np.ones(batch_size, np.float32),
                np.arange(first, first + batch_size),
            )
