"""Ranks as threads, and samples that scikit-learn knows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.models.meeting import Meeting


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., list[Any]]:
    """Calls `function(rank, sum_over_ranks)` on so many ranks; what each returns."""

    def run(ranks: int, function: Callable[..., Any]) -> list[Any]:
        meeting = Meeting(ranks)
        return meeting.on_ranks(lambda rank: function(rank, lambda values: np.sum(meeting.all_of(values), axis=0)))

    return run


@pytest.fixture(scope="session")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Standardised features of 400 digits with a column of ones, and one-hot targets; three features are constant."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    features, targets = loaded.data[:400], np.eye(10)[loaded.target[:400]]
    deviation = features.std(axis=0)
    standard = (features - features.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return np.c_[standard, np.ones(len(standard))], targets


@pytest.fixture(scope="session")
def part_of() -> Callable[[int, int], slice]:
    """Gives the rows of one rank: with three ranks 1/6, 2/6 and 3/6 of all."""

    def part(rank: int, ranks: int, rows: int = 400) -> slice:
        ends = np.cumsum(np.arange(ranks + 1)) * rows // (ranks * (ranks + 1) // 2)
        return slice(int(ends[rank]), int(ends[rank + 1]))

    return part
