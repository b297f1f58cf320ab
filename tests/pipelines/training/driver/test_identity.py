"""Recorded cells are found again by the same command."""

import json
from pathlib import Path

import pytest

from conf.grid import read_grid
from conf.load import resolve
from pipelines.training.driver.identity import training_digest

FACTORS = "warm_start={{source: 'runs:/1/model', rate_factors: {{{}}}}}"
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize(
    ("grid", "config", "settings"),
    [
        ("batch_and_optimizer", "cifar10", ()),
        ("resolution", "cifar10", ("training.epochs=10",)),
        ("large_batch/claim", "cifar10_baseline", ("training.epochs=16",)),
        *(
            (f"large_batch/{name}", "large_batch", ())
            for name in ("ablations", "beyond", "compression", "lars", "lecture_rule", "seeds", "sgd")
        ),
    ],
)
def test_recorded_cells_are_found_by_the_same_command(grid: str, config: str, settings: tuple[str, ...]) -> None:
    text = (BENCHMARKS / "results" / f"{grid.replace('/', '_')}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    trained = {line["cell"]: line for line in lines if line["kind"] == "cell" and line["status"] == "finished"}
    (dataset,) = {line["run"]["settings"]["dataset_fingerprint"] for line in trained.values()}
    base, cells = str(BENCHMARKS / "grids" / f"{config}.yaml"), read_grid(BENCHMARKS / "grids" / f"{grid}.yaml")
    planned = {training_digest(resolve(base, [*settings, *cell.settings]), dataset) for cell in cells}
    assert trained.keys() <= planned, [trained[cell]["settings"] for cell in trained.keys() - planned]


def test_the_order_of_rate_factors_makes_another_training() -> None:
    orders = ("'stage*': 0.1, 'stage4*': 1", "'stage4*': 1, 'stage*': 0.1")
    assert len({training_digest(resolve("smoke", [FACTORS.format(order)]), "abc") for order in orders}) == 2
