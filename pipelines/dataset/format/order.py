"""The order of samples: a pure function of the rows, the seed and the epoch, equal for any number of ranks.

Step s of an epoch takes the positions `s*G .. (s+1)*G` of the epoch's order, where G is the global batch size. Rank r
of N takes the r-th part of them. Its micro-batch j of k is the j-th part of that, which rank `r*k + j` of `k*N` would
take. Every rank has the same number of steps, and (epoch, step) is the whole state.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def epoch_order(
    group_rows: Sequence[int], *, seed: int, epoch: int, window_rows: int | None = None
) -> NDArray[np.int64]:
    """Permute all rows for one epoch.

    Args:
        group_rows: Number of rows of every row group, in reading order.
        seed: Seed of the run.
        epoch: Number of the epoch, from 0.
        window_rows: None: any row may have any position. Otherwise the row groups are shuffled and cut into
            windows of at most this many rows, and at least one row group. Rows are shuffled within a window. A step
            needs the row groups of one window, or of two at a border.
    """
    random = np.random.default_rng([seed, epoch])
    total = int(np.sum(group_rows))
    if window_rows is None:
        return random.permutation(total)
    first_rows = np.cumsum([0, *group_rows])
    windows: list[list[NDArray[np.int64]]] = []
    filled = 0
    for group in random.permutation(len(group_rows)).tolist():
        if not windows or filled + group_rows[group] > window_rows:
            windows.append([])
            filled = 0
        windows[-1].append(np.arange(first_rows[group], first_rows[group + 1]))
        filled += group_rows[group]
    return np.concatenate([random.permutation(np.concatenate(window)) for window in windows])


def steps_per_epoch(rows: int, global_batch_size: int) -> int:
    """Count the whole global batches of one epoch; the remaining rows differ between epochs."""
    return rows // global_batch_size


def rank_parts(
    order: NDArray[np.int64], *, global_batch_size: int, rank: int, size: int, start_step: int, micro_batches: int = 1
) -> list[NDArray[np.int64]]:
    """Return one rank's rows of every micro-batch of every step, from `start_step` on.

    Raises:
        ValueError: `size * micro_batches` does not divide `global_batch_size`.
    """
    if global_batch_size % (size * micro_batches):
        each = f", {micro_batches} micro-batches each" if micro_batches > 1 else ""
        raise ValueError(f"a global batch of {global_batch_size} does not divide among {size} ranks{each}")
    part = global_batch_size // (size * micro_batches)
    starts = [
        step * global_batch_size + (rank * micro_batches + micro_batch) * part
        for step in range(start_step, steps_per_epoch(len(order), global_batch_size))
        for micro_batch in range(micro_batches)
    ]
    return [order[start : start + part] for start in starts]


def evaluation_parts(rows: int, *, batch_size: int, rank: int, size: int) -> list[NDArray[np.int64]]:
    """Return one rank's rows of an evaluation: each row is on exactly one rank, and the last batch may be shorter."""
    own = np.array_split(np.arange(rows), size)[rank]
    return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
