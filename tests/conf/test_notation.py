"""Numbers as YAML 1.2 writes them."""

from pathlib import Path

import pytest

from conf.describe import to_yaml
from conf.grid import read_grid
from conf.load import load
from conf.notation import parse, text_of


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("-010", -10),
        ("+7", 7),
        ("0", 0),
        ("008", 8),
        ("0o10", 8),
        ("0x10", 16),
        ("0xfF", 255),
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.5e+1", -5.0),
        ("-.inf", float("-inf")),
    ],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float) -> None:
    found = parse(text, "here")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1:30", "1:30.5", "1_000", "1_000.5", "0b11", "0o8", "-0x10", "1e", "."])
def test_what_only_yaml_1_1_takes_for_a_number_is_a_text(text: str) -> None:
    assert parse(text, "here") == text
    with pytest.raises(ValueError, match=rf"training\.seed='{text}': should be a valid integer$"):
        load("smoke", [f"training.seed={text}"])


def test_settings_and_grids_have_the_same_numbers(tmp_path: Path) -> None:
    assert load("smoke", ["training.epochs=010", "training.seed=0o10"]).training.epochs == 10
    file = tmp_path / "grid.yaml"
    file.write_text("product: {training.seed: [008, 010]}")
    assert [cell.values["training.seed"] for cell in read_grid(file)] == [8, 10]


@pytest.mark.parametrize("text", ["2024-01-31", "2024-31-12", "2001-12-14 21:59:43"])
def test_a_date_is_a_text(text: str) -> None:
    assert parse(f"{{name: {text}}}", "here") == parse(text_of({"name": text}), "here") == {"name": text}


@pytest.mark.parametrize("text", ["0o10", "010", "08", "1e5", "1_000", "1:30", ".5", "~", "yes"])
def test_a_text_that_looks_like_a_number_is_a_text_when_it_is_read_again(text: str, tmp_path: Path) -> None:
    assert parse(text_of({"name": text}), "here") == {"name": text}
    config = load("smoke", [f"tracking.run_name='{text}'"])
    for comments in (False, True):
        file = tmp_path / "config.yaml"
        file.write_text(to_yaml(config, comments=comments))
        assert load(str(file)) == config
