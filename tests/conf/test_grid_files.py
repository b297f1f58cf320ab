"""The grids of the benchmarks: every cell is a valid configuration, and none is there twice."""

import json
from pathlib import Path

import pytest

from conf.grid import read_grid
from conf.load import load
from conf.schema import RunConfig

FOLDER = Path(__file__).parents[1] / "benchmarks" / "grids"
BASES = {
    "batch_and_optimizer": "cifar10",
    "resolution": "cifar10",
    **{
        f"large_batch/{name}": "large_batch"
        for name in ("sgd", "lars", "lamb", "beyond", "lecture_rule", "seeds", "ablations", "longer", "compression")
    },
    "large_batch/claim": "cifar10_baseline",
}
"""By grid the configuration at which it is trained."""


def test_every_file_is_one_of_them() -> None:
    files = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")}
    assert files == {*BASES, *BASES.values()}


@pytest.mark.parametrize("name", sorted({*BASES.values()}))
def test_configurations_are_valid(name: str) -> None:
    assert load(str(FOLDER / f"{name}.yaml")).model.name in ("resnet_cifar", "resnet9", "airbench")


@pytest.mark.parametrize(("grid", "base"), BASES.items())
def test_every_cell_is_valid_and_unlike_the_others(grid: str, base: str) -> None:
    cells = read_grid(FOLDER / f"{grid}.yaml")
    found = [load(str(FOLDER / f"{base}.yaml"), cell.settings) for cell in cells]
    assert len({json.dumps(config.model_dump(mode="json"), sort_keys=True) for config in found}) == len(cells)


def cells_of(*names: str) -> list[RunConfig]:
    """The configurations of some grids of `large_batch`."""
    files = [FOLDER / "large_batch" / f"{name}.yaml" for name in names]
    return [load(str(FOLDER / "large_batch.yaml"), cell.settings) for file in files for cell in read_grid(file)]


def test_every_batch_is_tuned_with_at_least_four_rates_of_each_optimizer() -> None:
    rates: dict[tuple[str, int], set[float | None]] = {}
    for config in cells_of("sgd", "lars", "lamb", "beyond"):
        key = (config.optimizer.name, config.global_batch_size)
        rates.setdefault(key, set()).add(config.optimizer.learning_rate)
    both = {(name, batch) for name in ("sgd", "lars") for batch in (128, 1024, 4096, 16384)}
    assert set(rates) == both | {("lamb", 128), ("lamb", 4096)}
    assert min(len(each) for each in rates.values()) == 4


def test_all_have_the_same_epochs_and_enough_steps_at_4096() -> None:
    configs = cells_of("sgd", "lars", "lamb", "beyond", "lecture_rule")
    images, batch = 50_000, 4096
    assert {config.training.epochs * (images // batch) for config in configs} == {1_200}


def test_every_batch_is_normalised_over_as_many_images() -> None:
    assert {config.training.batch_size_per_worker for config in cells_of("sgd", "lars", "beyond")} == {128}
