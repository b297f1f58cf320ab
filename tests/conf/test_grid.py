"""The cells of a grid file, and the grids of the benchmarks."""

import json
from pathlib import Path

import pytest

from conf.grid import Cell, read_grid
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


def cells(folder: Path, text: str) -> list[Cell]:
    (folder / "grid.yaml").write_text(text)
    return read_grid(folder / "grid.yaml")


def test_every_combination_of_a_product_is_a_cell(tmp_path: Path) -> None:
    found = cells(tmp_path, "product: {optimizer: [sgd, lars], training.seed: [0, 1]}")
    assert ([cell.text for cell in found], [cell.number for cell in found]) == (
        [
            "optimizer=sgd, training.seed=0",
            "optimizer=sgd, training.seed=1",
            "optimizer=lars, training.seed=0",
            "optimizer=lars, training.seed=1",
        ],
        [1, 2, 3, 4],
    )


def test_blocks_with_common_settings_lists_and_products(tmp_path: Path) -> None:
    found = cells(
        tmp_path,
        """
        - set: {training.epochs: 3}
          cells:
            - {optimizer: {name: sgd, learning_rate: 1e-1}}
            - {optimizer: lars}
          product: {training.seed: [0, 1]}
        - cells: [{exchange.codec: powersgd}]
        """,
    )
    assert [len(cell.values) for cell in found] == [3, 3, 3, 3, 1]
    config = load("smoke", found[1].settings)
    assert (config.training.epochs, config.training.seed, config.optimizer.name) == (3, 1, "sgd")
    assert (config.optimizer.learning_rate, load("smoke", found[4].settings).exchange.codec.name) == (0.1, "powersgd")


def test_values_of_every_kind_reach_the_configuration(tmp_path: Path) -> None:
    (cell,) = cells(
        tmp_path, "cells: [{training.ema: 0.5, tracking.registered_model: null, model.depth: 18, dataset.path: '7: x'}]"
    )
    config = load("smoke", cell.settings)
    assert (config.training.ema, config.tracking.registered_model, config.dataset.path) == (0.5, None, "7: x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected keys of set, product, cells, for example product: "),
        ("[]", "has no cells"),
        ("training.seed: [0, 1]", "'training.seed' is not one of set, product, cells; settings belong under one"),
        ("product: {training.seed: 3}", "training.seed=3 should be a list of values, such as [1, 2]"),
        ("product: {training.seed: []}", "training.seed=[] should be a list of values"),
        ("product: [training.seed]", "product: expected section.key: value"),
        ("cells: {}", "cells should be a list of settings"),
        ("cells: [sgd]", "cell 1: expected section.key: value, got sgd"),
        ("product: {1: [2]}", "1 is not a key such as training.seed"),
        ("product: {training.output: [a, b]}", "training.output is the same for the whole grid"),
        ("[{set: {training.seed: 1}, product: {training.seed: [1]}}]", "block 1: training.seed is given twice"),
        (
            "{set: {optimizer.momentum: 0.5}, cells: [{optimizer: {name: sgd, momentum: 0.9}}]}",
            "optimizer.momentum is given twice, also within optimizer",
        ),
        (
            "product: {exchange.codec.density: [0.1], exchange: [{codec: {name: topk, density: 0.2}}]}",
            "exchange.codec.density is given twice, also within exchange",
        ),
        ("set: {training.seed: .inf}", "is not a value of YAML's plain kinds: quote it"),
        ("cells: [{optimizer: sgd, optimizer.name: lars}]", "cell 1: optimizer is given twice, and one would"),
        ("{set: {optimizer: sgd}, product: {optimizer.name: [lars]}}", "optimizer is given twice, and one would"),
        (
            "{set: {exchange.codec.name: topk}, cells: [{exchange: {codec: none}}]}",
            "exchange.codec is given twice, also",
        ),
        ("product: {training.seed: [0, 1}", "grid.yaml: no valid YAML at line 1, column 31"),
    ],
)
def test_mistakes_name_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^grid ") as error:
        cells(tmp_path, text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("nowhere.yaml", FileNotFoundError, r"grid .*nowhere\.yaml cannot be read: No such file"),
        ("picture.yaml", ValueError, "not a text file"),
    ],
)
def test_a_grid_that_cannot_be_read(tmp_path: Path, name: str, error: type[Exception], message: str) -> None:
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff")
    with pytest.raises(error, match=message):
        read_grid(tmp_path / name)


def test_every_file_is_one_of_them() -> None:
    assert {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")} == {
        *BASES,
        *BASES.values(),
    }


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
        rates.setdefault((config.optimizer.name, config.global_batch_size), set()).add(config.optimizer.learning_rate)
    both = {(name, batch) for name in ("sgd", "lars") for batch in (128, 1024, 4096, 16384)}
    assert (set(rates), min(len(each) for each in rates.values())) == (both | {("lamb", 128), ("lamb", 4096)}, 4)


def test_all_have_the_same_epochs_and_enough_steps_at_4096() -> None:
    configs, steps = cells_of("sgd", "lars", "lamb", "beyond", "lecture_rule"), 50_000 // 4096
    assert {config.training.epochs * steps for config in configs} == {1_200}


def test_every_batch_is_normalised_over_as_many_images() -> None:
    assert {config.training.batch_size_per_worker for config in cells_of("sgd", "lars", "beyond")} == {128}
