"""The cells of a grid file."""

from pathlib import Path

import pytest

from conf.grid import Cell, read_grid
from conf.load import load


def cells(folder: Path, text: str) -> list[Cell]:
    (folder / "grid.yaml").write_text(text)
    return read_grid(folder / "grid.yaml")


def test_every_combination_of_a_product_is_a_cell(tmp_path: Path) -> None:
    found = cells(tmp_path, "product: {optimizer: [sgd, lars], training.seed: [0, 1]}")
    assert [cell.text for cell in found] == [
        "optimizer=sgd, training.seed=0",
        "optimizer=sgd, training.seed=1",
        "optimizer=lars, training.seed=0",
        "optimizer=lars, training.seed=1",
    ]
    assert [cell.number for cell in found] == [1, 2, 3, 4]


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
    assert config.optimizer.learning_rate == 0.1
    assert load("smoke", found[4].settings).exchange.codec.name == "powersgd"


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
        ("cells: [{optimizer: sgd, optimizer.name: lars}]", "cell 1: optimizer is given twice, of which one would"),
        ("{set: {optimizer: sgd}, product: {optimizer.name: [lars]}}", "optimizer is given twice, of which one would"),
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


def test_a_grid_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"grid .*nowhere\.yaml cannot be read: No such file"):
        read_grid(tmp_path / "nowhere.yaml")
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match="not a text file"):
        read_grid(tmp_path / "picture.yaml")
