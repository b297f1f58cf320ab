"""The limits of an attempt, and the rules for another one: when, after which wait and with how many ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.launch.driver.failure import InfrastructureError, SparkGoneError

_MAXIMUM_WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Attempt:
    """One attempt at a job."""

    number: int
    """Number of the attempt, from 1; the function gets it from `pipelines.launch.rank.report.attempt`."""
    num_workers: int
    after: str = ""
    """Why the previous attempt failed, in one line."""
    grown: int = 0
    """Number of earlier attempts that ended because slots for all ranks became available: these are no failures."""


@dataclass(frozen=True)
class TimeLimits:
    """The time limits of every attempt, in seconds."""

    start: float
    """Seconds within which all ranks must begin."""
    hang: float | None
    """Seconds that a rank may be silent; None: no limit."""
    stop_grace: float
    """Seconds within which ranks must end after a request to stop."""


@dataclass(frozen=True)
class RetryPolicy:
    """The retry policy: only infrastructure failures are retried, not exceptions of the function."""

    retries: int
    first_wait: float
    """Seconds before the first further attempt; doubled for each later one."""
    allowed_sizes: Sequence[int]
    """Numbers of ranks that a further attempt may have when slots are lost."""

    def retries_after(self, attempt: Attempt, error: InfrastructureError) -> bool:
        """Return whether another attempt follows."""
        return attempt.number - attempt.grown <= self.retries and not isinstance(error, SparkGoneError)

    def wait_seconds(self, attempt: Attempt) -> float:
        """Return the seconds to wait after a failed attempt."""
        return min(self.first_wait * 2.0 ** (attempt.number - attempt.grown - 1), _MAXIMUM_WAIT_SECONDS)

    def size(self, wanted: int, slots: int) -> int | None:
        """Return the number of ranks that fits the slots: `wanted` or the largest allowed; None: no number fits."""
        if slots >= wanted:
            return wanted
        return max((size for size in self.allowed_sizes if size <= slots), default=None)
