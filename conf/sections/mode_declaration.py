"""The declaration of a training mode for the rest of the product, without TensorFlow."""

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from conf.sections.section import Section, choice_at


class Refusal(NamedTuple):
    """A setting with values that do not fit a mode; the error is `key=value reason: remedy`."""

    key: str
    """Key, such as `training.precision`; the values of a choice, such as `exchange.codec`, are its names."""
    allowed: Container[Any]
    """Allowed values, in addition to null and empty lists."""
    reason: str
    remedy: str


class Idle(NamedTuple):
    """A setting that has no effect with some values of others, or with a mode, which is a mistake of the user."""

    key: str
    reason: str
    where: Mapping[str, Container[Any]] = {}
    """Other settings, or properties of sections, with values. The rule holds only if each has one of its values."""
    per_run: bool = False
    """Whether these other settings usually differ between runs. If so, a file may set this key without an error."""

    def is_idle(self, config: Section) -> bool:
        """Return whether the setting has no effect in a configuration."""
        return all(choice_at(config, key) in values for key, values in self.where.items())


class Beginning(NamedTuple):
    """A setting that delays the effect of a mode."""

    key: str
    steps: int
    """Number of optimizer steps before the effect."""
    meaning: str
    """Text for the case that the run ends before the effect."""


@dataclass(frozen=True)
class AllBut:
    """All values except some."""

    refused: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        """Return whether a value is none of the exceptions."""
        return value not in self.refused


def multiples_of(number: int) -> range:
    """Return all multiples of a number."""
    return range(0, sys.maxsize, number)


class ModeDeclaration:
    """All that the rest of the product knows and asks about a training mode.

    Your own mode is a class that inherits this one, in a module that does not import TensorFlow. Driver and workers
    create it with `training.mode.settings` as keyword arguments.
    """

    implementation: ClassVar[str] = ""
    """Import path of the function that creates the mode on a rank, see `pipelines.training.step.mode.MakeMode`. The
    modes of this project use a table instead."""
    not_in_place: ClassVar[str] = ""
    """Why training cannot continue in place after a worker's process died; empty: it can."""
    is_lock_step: ClassVar[bool] = False
    """Whether each step applies the mean of all workers' gradients of this step: `groundswell scale` predicts such
    steps, and `groundswell find-rate` runs them in every mode."""
    is_tried_by_find_batch: ClassVar[bool] = True
    """Whether `groundswell find-batch` can run its steps in this mode; otherwise it runs steps of `synchronous`."""
    keeps_by_path: ClassVar[bool] = False
    """Whether the mode identifies variables by their paths, which must then differ."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """The mode's figures of an epoch, each with its meaning in a line without a full stop."""

    @property
    def layout(self) -> str:
        """Name of the content of a checkpoint: a training may change its mode if this name stays the same."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def ranks_per_copy(self) -> int:
        """Number of consecutive workers that together hold one copy of the model and use the same samples."""
        return 1

    @property
    def unawaited_workers(self) -> int:
        """Number of workers that no step waits for."""
        return 0

    def refusals(self) -> Sequence[Refusal]:
        """Return the settings that do not fit the mode; an error names the first one."""
        return ()

    def idle(self) -> Sequence[Idle]:
        """Return the settings that have no effect."""
        return ()

    def beginning(self) -> Beginning | None:
        """Return the effect that must begin before the run ends."""
        return None

    def exchanges(self, epochs: int, steps_per_epoch: int) -> int | None:
        """Return the approximate number of the workers' exchanges in a run; None: one in every step."""
        return None

    def wanted_exchanges(self) -> tuple[str, int] | None:
        """Return a setting with its value, and the least number of exchanges that it needs; None: no limit."""
        return None
