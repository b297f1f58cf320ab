"""The phases of a step: how long each rank spends on each part, and a table of them over all epochs and attempts."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.machine.json_text import parse_json
from pipelines.storage.folder import Location

PHASES = {
    "input": "waiting for the next batch",
    "compute": "forward and backward pass, and what is not in another phase",
    "encode": "encoding gradients",
    "wire": "sending and receiving, as far as it is not hidden by the backward pass",
    "decode": "decoding what was received",
    "optimizer": "the update of the weights",
    "waiting": "waiting for the slowest rank",
}
"""The phases in their order within a step, with their meaning."""


@dataclass(frozen=True)
class StepPhases:
    """Mean seconds of each phase per step, by rank."""

    seconds: tuple[Mapping[str, float], ...]
    """All of `PHASES` for each rank."""

    @property
    def slowest_rank(self) -> int:
        """The rank that the others wait for, which is the one that waits least."""
        return min(range(len(self.seconds)), key=lambda rank: self.seconds[rank]["waiting"])

    @property
    def mean(self) -> dict[str, float]:
        """The mean over the ranks."""
        return {name: float(np.mean([rank[name] for rank in self.seconds])) for name in PHASES}


def divide(rows: NDArray[np.float64]) -> StepPhases:
    """Return the phases of each rank from its mean seconds per step `(ranks, 7)`, the rows of `StepMeasurements.take`.

        exposed(rank)       = time after the last gradient - optimizer
        exchange(rank)      = encode + collective + decode, bucket by bucket
        encode, ..., decode = their part of min(exchange(rank), exposed(rank))
        waiting(rank)       = collective(rank) - the smallest collective of all ranks
        wire                = the smallest collective: the rank that arrives last does not wait for others
        compute             = wall time - all other phases, at least 0

    Several buckets are sent at the same time, while the backward pass still computes earlier layers. The sum of their
    times may therefore be longer than the step. Communication that computation hides is part of `compute`.
    """
    steps, waited, encode, collective, decode, optimizer, after_gradients = rows.T
    exchange = encode + collective + decode
    exposed = np.clip(after_gradients - optimizer, 0.0, exchange)
    share = np.divide(exposed, exchange, out=np.zeros_like(exchange), where=exchange > 0)
    encode, collective, decode = encode * share, collective * share, decode * share
    others = waited + encode + collective + decode + optimizer
    columns = {
        "input": waited,
        "compute": np.maximum(0.0, steps - others),
        "encode": encode,
        "wire": np.full_like(collective, collective.min()),
        "decode": decode,
        "optimizer": optimizer,
        "waiting": collective - collective.min(),
    }
    return StepPhases(
        tuple({name: float(column[rank]) for name, column in columns.items()} for rank in range(len(rows)))
    )


def line_of(phases: StepPhases) -> str:
    """Return a line with the share of each phase, and the slowest rank if the others wait for it."""
    mean = phases.mean
    whole = sum(mean.values())
    parts = [f"{name} {100 * seconds / whole:.0f} %" for name, seconds in mean.items() if seconds >= 0.005 * whole]
    slowest = f"; slowest is rank {phases.slowest_rank}" if mean["waiting"] >= 0.005 * whole else ""
    return f"a step takes {1000 * whole:.0f} ms: {', '.join(parts)}{slowest}"


def table_of(phases: StepPhases, epoch: int) -> list[dict[str, float]]:
    """Return a row for each rank in an epoch; epochs are counted from 1."""
    return [
        {"epoch": epoch, "rank": rank, **{f"{name}_seconds": value for name, value in seconds.items()}}
        for rank, seconds in enumerate(phases.seconds)
    ]


FILE_NAME = "phases.json"
_log = logging.getLogger(__name__)


class PhaseTable:
    """The rows of all epochs so far, one per epoch and rank, in a file in the checkpoints' folder."""

    def __init__(self, checkpoints: Location, start_step: int) -> None:
        """Read the rows that earlier processes wrote about the epochs in the checkpoint.

        Args:
            checkpoints: Folder or URL of the run's checkpoints.
            start_step: Number of steps in the checkpoint from which training continues; later epochs are dropped.
        """
        self._folder = checkpoints
        self._epochs = [epoch for epoch in self._read() if epoch["step"] <= start_step]

    def add(self, phases: StepPhases, *, epoch: int, step: int) -> list[dict[str, float]]:
        """Add an epoch and return the rows of all epochs.

        Args:
            phases: Times of the parts of its steps.
            epoch: Its number, from 1.
            step: Number of optimizer steps at its end.

        Raises:
            OSError: The file cannot be written.
            StorageError: The storage behind a URL cannot be used.
        """
        self._epochs.append({"step": step, "rows": table_of(phases, epoch)})
        self._folder.make()
        self._folder.write(FILE_NAME, json.dumps(self._epochs).encode(), flush=False)
        return [row for each in self._epochs for row in each["rows"]]

    @property
    def latest(self) -> StepPhases | None:
        """The phases of the last epoch's steps; None if no epoch is known."""
        if not self._epochs:
            return None
        return StepPhases(tuple({name: row[f"{name}_seconds"] for name in PHASES} for row in self._epochs[-1]["rows"]))

    def _read(self) -> list[dict[str, Any]]:
        try:
            return list(parse_json(self._folder.read(FILE_NAME)))
        except FileNotFoundError:
            return []
        except ValueError as error:
            _log.warning("%s cannot be read (%s): it starts again", self._folder / FILE_NAME, error)
            return []
