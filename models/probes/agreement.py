"""Sums over ranks that prove, in the same exchange, that all ranks have the same weights."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SumOverRanks = Callable[[Array], Array]
"""Function from a rank's array to the sum of the arrays of all ranks, with the same bits on every rank."""


def agreed_sum(values: Array, weights: NDArray[Any], sum_over_ranks: SumOverRanks) -> Array:
    """Sum values over ranks that hold equal weights.

    Each rank runs the same solver, which may round differently on other processors. Ranks would then run different
    numbers of iterations and wait for each other forever. Therefore 33 numbers are sent with the values: a 1, and the
    SHA-256 of the weights as 16 whole numbers d of 16 bits, with their squares. By Cauchy and Schwarz

        ranks * sum(d^2) >= sum(d)^2,  equal only where all ranks have the same d

    and in float64 these sums are exact on up to two million ranks.

    Args:
        values: One-dimensional; the same length on every rank.
        weights: Array that must have the same bits on every rank.
        sum_over_ranks: The collective.

    Raises:
        RuntimeError: The ranks have different weights; all ranks raise this error.
    """
    digest = hashlib.sha256(np.ascontiguousarray(weights).tobytes()).digest()
    words = np.frombuffer(digest, "<u2").astype(np.float64)
    summed = sum_over_ranks(np.concatenate([values, [1.0], words, words**2]))
    ranks, totals, squares = summed[len(values)], summed[len(values) + 1 :][:16], summed[-16:]
    if not np.array_equal(ranks * squares, totals**2):
        raise RuntimeError(
            f"the weights of the probe are not the same on all {int(ranks)} ranks: processors of several kinds may "
            "round differently. Run all ranks on hosts of one kind, or set launch.num_workers=1"
        )
    return summed[: len(values)]
