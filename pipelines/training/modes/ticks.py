"""The clock of a pipeline: which stage computes which micro-batch in which tick; this module imports no TensorFlow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ticks:
    """The ticks of one step: first those of the forward clock, then the same number of the backward clock.

        forward clock:   stage s computes micro-batch t - s            in tick t of M + S - 1
        backward clock:  stage s computes micro-batch t - (S - 1 - s)  in tick t of M + S - 1

    A stage without a micro-batch in a tick is idle: in S - 1 of M + S - 1 ticks of each clock.

    Source: Huang et al. 2019 (GPipe), figure 2.
    """

    stages: int
    """Number of stages, S."""
    micro_batches: int
    """Number of micro-batches per step, M."""

    @property
    def of_a_clock(self) -> int:
        """Number of ticks of each clock."""
        return self.micro_batches + self.stages - 1

    def forward(self, tick: int, stage: int) -> int | None:
        """Return the micro-batch that a stage computes in a tick of the forward clock; None: it is idle."""
        return self._micro_batch(tick - stage)

    def backward(self, tick: int, stage: int) -> int | None:
        """Return the micro-batch that a stage computes in a tick of the backward clock; None: it is idle."""
        return self._micro_batch(tick - (self.stages - 1 - stage))

    def _micro_batch(self, number: int) -> int | None:
        return number if 0 <= number < self.micro_batches else None


def idle_formula(stages: int, micro_batches: int) -> float:
    """Return the fraction of ticks in which a stage is idle, (S - 1) / (M + S - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)
