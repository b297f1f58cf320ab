"""A grid file, which says how the settings of a configuration are varied."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.effect import is_within
from conf.keys import without_tag
from conf.load import flat
from conf.notation import parse
from conf.sections.section import refuse

_KEYS = ("set", "product", "cells")
_EXAMPLE = "product: {optimizer: [sgd, lars], training.seed: [0, 1, 2]}"
_OF_THE_WHOLE_GRID = (
    "launch.master",
    "tracking.experiment",
    "tracking.run_name",
    "training.output",
    "training.resume_run",
)


@dataclass(frozen=True)
class Cell:
    """One combination of settings."""

    number: int
    """Place in the file, from 1."""
    values: dict[str, Any]
    """Value by key, such as `optimizer.learning_rate`; `optimizer` stands for `optimizer.name`."""

    @property
    def settings(self) -> list[str]:
        """The overrides as texts for `--set`; JSON is valid YAML."""
        return [f"{key}={json.dumps(value)}" for key, value in self.values.items()]

    @property
    def text(self) -> str:
        """The cell in one line, for readers."""
        return ", ".join(f"{key}={_plain(value)}" for key, value in self.values.items()) or "no settings"


def read_grid(path: Path) -> list[Cell]:
    """Return the cells of a grid file, in the file's order.

    The file holds one block or a list of blocks. A block has any of these keys: `set` (settings of all its cells);
    `product` (a list of values for each key: every combination is a cell); `cells` (a list of settings: each is a cell,
    and with a product each is combined with every combination).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not YAML or not of this form; the message names the file and the place in it.
    """
    try:
        content = parse(path.read_bytes(), f"grid {path}")
    except OSError as error:
        raise FileNotFoundError(f"grid {path} cannot be read: {error.strerror}") from None
    blocks = content if isinstance(content, list) else [content]
    found: list[dict[str, Any]] = []
    for place, block in enumerate(blocks, 1):
        where = f"grid {path}" + (f", block {place}" if isinstance(content, list) else "")
        found += _cells(block, where)
    if not found:
        raise ValueError(f"grid {path} has no cells, expected for example {_EXAMPLE}")
    return [Cell(number, values) for number, values in enumerate(found, 1)]


def _cells(block: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(block, Mapping) or not block:
        raise ValueError(f"{where}: expected keys of {', '.join(_KEYS)}, for example {_EXAMPLE}")
    refuse(
        *(
            (key not in _KEYS, f"{where}: {key!r} is not one of {', '.join(_KEYS)}; settings belong under one of them")
            for key in block
        )
    )
    common = _settings(block.get("set", {}), f"{where}, set")
    product = _settings(block.get("product", {}), f"{where}, product")
    listed = block.get("cells", [{}])
    refuse(
        *(
            (
                not isinstance(values, list) or not values,
                f"{where}, product: {key}={_plain(values)} should be a list of values, such as [1, 2]",
            )
            for key, values in product.items()
        ),
        (
            not isinstance(listed, list) or not listed,
            f"{where}: cells should be a list of settings, such as [{{optimizer: sgd}}]",
        ),
    )
    for place, cell in enumerate(listed, 1):
        own = _settings(cell, f"{where}, cell {place}")
        keys = [*common, *own, *product]
        refuse(*((keys.count(key) > 1, f"{where}: {key} is given twice, and one would have no effect") for key in keys))
        for combination in itertools.product(*product.values()):
            values = {**common, **own, **dict(zip(product, combination, strict=True))}
            sections = {key: section_with(values, key) for key in values}
            refuse(
                *(
                    (section, f"{where}: {key} is given twice, also within {section}, and one would have no effect")
                    for key, section in sections.items()
                )
            )
            yield values


def _settings(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected section.key: value, got {_plain(values)}")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: {name!r} is not a key such as training.seed")
        key = without_tag(name)
        refuse(
            (key in found, f"{where}: {key} is given twice, and one would have no effect"),
            (
                key in _OF_THE_WHOLE_GRID,
                f"{where}: {key} is the same for the whole grid: give it by --config or --set",
            ),
        )
        found[key] = value
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(f"{where}: {key}={value!r} is not a value of YAML's plain kinds: quote it") from None
    return found


def section_with(values: Mapping[str, Any], key: str) -> str | None:
    """Return the key of a section among `values` that also sets `key`; None: there is none.

    Args:
        values: Values by key, such as `{"optimizer": {"name": "sgd", "momentum": 0.9}}`.
        key: A key, such as `optimizer.momentum`.
    """
    return next(
        (
            section
            for section, inner in values.items()
            if section != key
            and is_within(key, section)
            and any(is_within(name, key) for name, _ in flat({section: inner}))
        ),
        None,
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")
