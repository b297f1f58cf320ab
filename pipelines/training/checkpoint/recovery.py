"""The in-place recovery: the ranks continue in the same processes after one of them has died."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from pipelines.launch.driver.failure import names_lost_peer
from pipelines.launch.rank import membership
from pipelines.training.checkpoint.in_memory import InMemoryCheckpoints
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.step.mode import Mode

_NONE = -1
_log = logging.getLogger(__name__)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an exchange failed because another rank has ended."""
    return isinstance(error, tf.errors.OpError | HorovodInternalError) and names_lost_peer(str(error))


@dataclass
class Recovery:
    """Writes this rank's in-memory checkpoints and continues from them together with the other ranks.

    Every rank can return to the state after either of its last two steps. If ranks train alone between two exchanges,
    these are its latest step and the last step before the latest exchange. A spare that replaces a dead process reads
    that process's state from shared memory. No state is sent between ranks, and training continues bit for bit.
    """

    collective: HorovodCollective
    in_memory: InMemoryCheckpoints
    every_steps: int
    """Number of optimizer steps between two in-memory checkpoints."""
    uses_kernels: bool
    """Whether this rank compresses with C++ kernels. A spare must know this before it takes over."""
    reset: Callable[[], None]
    """Discards the micro-batches of an unfinished step."""
    replaced: list[int] = field(default_factory=list)
    """Replaced ranks of the latest `take_over` or `rejoin`."""

    def save(self, state: TrainingState) -> None:
        """Write an in-memory checkpoint; the losses in `state` are this rank's own."""
        self.in_memory.write(state, uses_kernels=self.uses_kernels)

    def take_over(self) -> TrainingState:
        """Wait in a spare until it replaces its rank, join the others and return the state to continue from.

        Raises:
            RuntimeError: The ranks have no common state.
        """
        membership.wait_for_turn()
        _log.info("rank %d: this process takes the place of one that has died", self.collective.rank)
        return self._continue(is_new=True)

    def rejoin(self) -> TrainingState:
        """Leave the job that has lost a rank, join it again and return the state to continue from.

        Raises:
            RuntimeError: The ranks have no common state.
        """
        hvd.shutdown()
        return self._continue(is_new=False)

    def _continue(self, *, is_new: bool) -> TrainingState:
        positions = self.in_memory.positions()
        self.collective.join(progress=max(positions, default=0))
        began = time.perf_counter()
        mine = [int(is_new), *[_NONE, _NONE, *positions][-2:]]
        everyones = self.collective.concatenate(np.array([mine], np.int64))
        self.replaced = np.flatnonzero(everyones[:, 0]).tolist()
        common = set.intersection(
            *(
                {self.in_memory.block(position) for position in row if position != _NONE}
                for row in everyones[:, 1:].tolist()
            )
        )
        if not common:
            raise RuntimeError(f"{membership.NO_COMMON_STATE}: nothing is there to continue from in place")
        state = self.in_memory.restore(
            max(position for position in positions if self.in_memory.block(position) == max(common))
        )
        self.reset()
        seconds = time.perf_counter() - began
        _log.info("rank %d continues in place after step %d (%.2f s)", self.collective.rank, state.step, seconds)
        return state


def make_recovery(
    collective: HorovodCollective,
    variables: Sequence[Any],
    mode: Mode,
    every_steps: int,
    reset: Callable[[], None],
    *,
    uses_kernels: bool,
) -> Recovery | None:
    """Make the in-place recovery of this rank; return None if the launcher has no spares.

    Args:
        collective: The ranks.
        variables: All variables of Keras and TensorFlow that training changes on this rank, except `mode.between`; its
            next process has the same ones.
        mode: The mode, which decides which states of the ranks belong together.
        every_steps: The same as in `Recovery`.
        reset: The same as in `Recovery`.
        uses_kernels: The same as in `Recovery`.
    """
    files = membership.shared_memory_files()
    if not files:
        return None
    plain = [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]
    return Recovery(
        collective,
        InMemoryCheckpoints(files[:2], [*plain, *mode.between], mode.block),
        every_steps,
        uses_kernels,
        reset,
    )
