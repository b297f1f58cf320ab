"""The cells of a grid, each with its own configuration, checked before the first one starts."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conf.effect import refuse_idle, refuse_without_effect
from conf.grid import Cell, read_grid, section_with
from conf.keys import choices, without_tag
from conf.load import base_of, keys_of, override, resolve
from conf.schema import RunConfig
from jobs.shell.command import USER_ERROR, exit_code
from jobs.shell.paths import with_absolute_paths
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.tracking.store.served import find_model
from pipelines.training.driver.checks import check_dataset, check_output
from pipelines.training.driver.identity import training_digest

_LONGEST_NAME = 120


@dataclass(frozen=True)
class PlannedCell:
    """One training of a grid."""

    cell: Cell
    config: RunConfig
    manifest: Manifest
    digest: str

    def check_dataset_stays(self) -> None:
        """Check, before the cell is trained, that the dataset is still the one for which it was planned.

        Raises:
            FileNotFoundError, ValueError: The dataset was deleted or replaced.
        """
        if read_manifest(self.config.dataset.path).fingerprint != self.manifest.fingerprint:
            raise ValueError(
                f"cell {self.cell.number}: the dataset {self.config.dataset.path} was replaced while the grid was "
                "trained: the same command trains all cells on the new one"
            )

    @property
    def experiment(self) -> str:
        """Name of the experiment of the cell's run."""
        return chosen_experiment(self.config.tracking.experiment)

    @property
    def name(self) -> str:
        """Name of the cell's run: the settings of the grid, without the sections' names."""
        chosen = choices()
        parts = [
            str(value) if key.removesuffix(".name") in chosen else f"{key.rpartition('.')[2]}={value}"
            for key, value in _flat(self.cell.values)
        ]
        return (" ".join(parts) or "cell")[:_LONGEST_NAME]


def plan_cells(arguments: argparse.Namespace) -> list[PlannedCell]:
    """Return the cells of a grid file; a cell that occurs twice is trained once.

    Args:
        arguments: Arguments of the verb: the configuration and its settings, and the grid file.

    Raises:
        FileNotFoundError: The grid file does not exist.
        ValueError: A cell cannot be trained; the message names the cell.
        RuntimeError: A cell cannot be trained now, but perhaps later; the message names the cell.
    """
    cells = read_grid(arguments.grid)
    for key in map(without_tag, keys_of(arguments.set)):
        if all(key in cell.values for cell in cells):
            raise ValueError(f"--set {key} has no effect: every cell of {arguments.grid} sets it")
        for cell in cells:
            section = section_with(cell.values, key)
            if section is not None:
                raise ValueError(f"--set {key}: cell {cell.number} ({cell.text}) sets it too, within {section}")
    planned: dict[str, PlannedCell] = {}
    for cell in cells:
        try:
            found = _planned(cell, arguments)
        except (ValueError, OSError, RuntimeError) as error:
            raise named(error, cell) from None
        first = planned.setdefault(found.digest, found)
        if first.config != found.config:
            raise ValueError(
                f"cells {first.cell.number} ({first.cell.text}) and {cell.number} ({cell.text}) of {arguments.grid} "
                "are one training: what they differ in has no influence on its result"
            )
    return list(planned.values())


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def named(error: Exception, cell: Cell) -> Exception:
    """Return the error with the cell's number and settings before it, of a kind with the same exit code."""
    text = f"cell {cell.number} ({cell.text}): {error}"
    return ValueError(text) if exit_code(error) == USER_ERROR else RuntimeError(text)


def _planned(cell: Cell, arguments: argparse.Namespace) -> PlannedCell:
    config = resolve(arguments.config, [*arguments.set, *cell.settings])
    keys = list(cell.values)
    refuse_without_effect(config, keys, verb=arguments.verb, reads=arguments.reads, ignores=arguments.ignores)
    refuse_idle(config, base_of(arguments.config), keys, f"config {arguments.config}: ")
    if config.tracking.offline:
        raise ValueError("tracking.offline=true: a grid finds the runs of its cells in MLflow, set it to false")
    config = with_fixed_source(with_absolute_paths(config))
    manifest = check_dataset(config)
    check_output(config.training, config.dataset.path)
    return PlannedCell(cell, config, manifest, training_digest(config, manifest.fingerprint))


def with_fixed_source(config: RunConfig) -> RunConfig:
    """Replace an alias by the model version that it means now: later it may mean another version."""
    source = config.warm_start.source
    if source is None or not source.startswith("models:/") or not ("@" in source or source.endswith("/latest")):
        return config
    return override(config, warm_start={"source": find_model(source).uri})
