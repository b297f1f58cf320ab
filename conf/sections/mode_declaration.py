"""What a training mode declares to the rest of the product; no TensorFlow."""

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple


class Refusal(NamedTuple):
    """A setting that has values with which a mode does not go; the error is `key=value reason: remedy`."""

    key: str
    """Such as `training.precision`; the values of a choice, such as `exchange.codec`, are its names."""
    allowed: Container[Any]
    """Null and empty lists are allowed beside these."""
    reason: str
    remedy: str


class Idle(NamedTuple):
    """A setting that has no effect with a mode, which is a mistake of whoever chose it."""

    key: str
    reason: str
    where: Mapping[str, Container[Any]] = {}
    """Only where all these other settings have one of these values."""
    per_run: bool = False
    """Whether these other settings change from run to run."""


class Beginning(NamedTuple):
    """A setting that delays what a mode is for."""

    key: str
    steps: int
    """Optimizer steps before it."""
    meaning: str
    """What happens if the run ends before."""


@dataclass(frozen=True)
class AllBut:
    """All values except some."""

    refused: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        """Whether a value is none of these."""
        return value not in self.refused


def multiples_of(number: int) -> range:
    """All multiples of a number."""
    return range(0, sys.maxsize, number)


class ModeDeclaration:
    """What the rest of the product knows of a training mode, and all that it asks.

    A mode of yours is a class that inherits this one, in a module that imports no TensorFlow. Driver and workers make
    it with `training.mode.settings` as keyword arguments.
    """

    implementation: ClassVar[str] = ""
    """Import path of the function that makes the mode on a rank, see `pipelines.training.step.mode.MakeMode`. The
    modes of this project have it in a table instead."""
    not_in_place: ClassVar[str] = ""
    """Why training cannot continue in place where a worker's process dies; empty: it can."""
    is_lock_step: ClassVar[bool] = False
    """Whether each step applies the mean of the gradients that all workers have computed in it: `groundswell scale`
    predicts such steps, and `groundswell find-rate` takes them, whatever the mode is."""
    is_tried_by_find_batch: ClassVar[bool] = True
    """Whether `groundswell find-batch` can take its steps in this mode; else it takes those of `synchronous`."""
    keeps_by_path: ClassVar[bool] = False
    """Whether it tells variables apart by their paths, which must differ then."""
    metrics: ClassVar[Mapping[str, str]] = {}
    """Its figures of an epoch: what each one means, in a line without a full stop."""

    @property
    def layout(self) -> str:
        """Name of what a checkpoint holds: a training may change its mode where this stays the same."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def ranks_per_copy(self) -> int:
        """Consecutive workers that hold one copy of the model between them, and take the same samples."""
        return 1

    @property
    def unawaited_workers(self) -> int:
        """Number of workers that no step waits for."""
        return 0

    def refusals(self) -> Sequence[Refusal]:
        """The settings with which it does not go; an error names the first one."""
        return ()

    def idle(self) -> Sequence[Idle]:
        """The settings that have no effect."""
        return ()

    def beginning(self) -> Beginning | None:
        """What must begin before the run ends."""
        return None

    def exchanges(self, epochs: int, steps_per_epoch: int) -> int | None:
        """About how many times the workers exchange something in a run; None: in every step."""
        return None

    def wanted_exchanges(self) -> tuple[str, int] | None:
        """A setting with its value, and the number of exchanges that it wants at least; None: any number will do."""
        return None
