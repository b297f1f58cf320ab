"""The grids of the benchmarks: every cell is a valid configuration, and none is there twice."""

import json
from pathlib import Path

import pytest

from conf.grid import read_grid
from conf.load import load

FOLDER = Path(__file__).parents[1] / "benchmarks" / "grids"
BASES = {
    "batch_and_optimizer": "cifar10",
    "resolution": "cifar10",
    "large_batch/rates": "large_batch",
    "large_batch/lecture_rule": "large_batch",
}
"""By grid the configuration at which it is trained."""
ALONE = {"cifar10_baseline"}
"""Configurations that are trained without a grid."""


def test_every_file_is_one_of_them() -> None:
    files = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")}
    assert files == {*BASES, *BASES.values(), *ALONE}


@pytest.mark.parametrize("name", sorted({*BASES.values(), *ALONE}))
def test_configurations_are_valid(name: str) -> None:
    load(str(FOLDER / f"{name}.yaml"))


@pytest.mark.parametrize(("grid", "base"), BASES.items())
def test_every_cell_is_valid_and_unlike_the_others(grid: str, base: str) -> None:
    cells = read_grid(FOLDER / f"{grid}.yaml")
    found = [load(str(FOLDER / f"{base}.yaml"), cell.settings) for cell in cells]
    assert len({json.dumps(config.model_dump(mode="json"), sort_keys=True) for config in found}) == len(cells)


def test_large_batches_are_reached_on_the_workers_of_the_grid() -> None:
    base = FOLDER / "large_batch.yaml"
    configs = [load(str(base), cell.settings) for cell in read_grid(FOLDER / "large_batch" / "rates.yaml")]
    assert {config.global_batch_size for config in configs} == {128, 1024, 4096, 16384}
    images, longest = 50_000, 4096
    steps = {config.training.epochs * (images // longest) for config in configs}
    assert steps == {1_200}  # at 4,096: as many as the published runs have at least
