"""Medians, ratios and tables of what was measured in turn."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, float]


def ratio(values: Sequence[float], others: Sequence[float], digits: int = 3) -> float | None:
    """Median over the rounds of one value over the other one of the same round; None where one has no rounds."""
    if not (values and others):
        return None
    return round(statistics.median(value / other for value, other in zip(values, others, strict=True)), digits)


def medians(rounds: Sequence[Figures], digits: int = 4) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {name: round(statistics.median(each[name] for each in rounds), digits) for name in rounds[0]}


def largest(ranks: Sequence[Figures]) -> dict[str, float]:
    """Each figure of the rank that has most."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def slowest(ranks: Iterable[Mapping[str, Any]]) -> list[float]:
    """Seconds of each step: it ends when the last rank has done it."""
    return [max(step) for step in zip(*(rank["seconds"] for rank in ranks), strict=True)]


def row(cells: Iterable[Any]) -> str:
    """A line of a table in Markdown; None is a dash."""
    return f"| {' | '.join('-' if cell is None else str(cell) for cell in cells)} |"


def head(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return f"{row(names)}\n{'|---' * len(names)}|"
