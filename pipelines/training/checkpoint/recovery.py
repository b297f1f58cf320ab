"""Continuing in the same processes after one of them has died."""

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
from pipelines.training.checkpoint.kept_state import KeptStates
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.step.mode import Mode

_NONE = -1
_log = logging.getLogger(__name__)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exchange failed because another rank has ended."""
    return isinstance(error, tf.errors.OpError | HorovodInternalError) and names_lost_peer(str(error))


@dataclass
class Recovery:
    """Keeps the state of this rank, and goes on from it together with the others.

    Every rank keeps what it needs to repeat any of its last two steps; where ranks train alone between two exchanges,
    its latest step and the last one before the latest exchange. A process that takes a dead one's place finds the dead
    one's state in memory that both share. So nothing is handed from rank to rank, and training continues as if nothing
    had happened, bit for bit.
    """

    collective: HorovodCollective
    kept: KeptStates
    every_steps: int
    """Optimizer steps from one kept state to the next."""
    uses_kernels: bool
    """Whether this rank compresses with C++ kernels; a spare must know it before it is this rank."""
    reset: Callable[[], None]
    """Forgets what the micro-batches of an unfinished step have left."""
    replaced: list[int] = field(default_factory=list)
    """The ranks whose processes the latest `take_over` or `rejoin` has replaced."""

    def keep(self, state: TrainingState) -> None:
        """Keep the state of this rank; its losses are this rank's own."""
        self.kept.write(state, uses_kernels=self.uses_kernels)

    def take_over(self) -> TrainingState:
        """Wait, in a spare, until it is this rank; join the others, and return the state to continue from.

        Raises:
            RuntimeError: The ranks have no state in common.
        """
        membership.wait_for_turn()
        _log.info("rank %d: this process takes the place of one that has died", self.collective.rank)
        return self._continue(is_new=True)

    def rejoin(self) -> TrainingState:
        """Leave the job that has lost a rank, join it again, and return the state to continue from.

        Raises:
            RuntimeError: The ranks have no state in common.
        """
        hvd.shutdown()
        return self._continue(is_new=False)

    def _continue(self, *, is_new: bool) -> TrainingState:
        places = self.kept.places()
        self.collective.join(progress=max(places, default=0))
        began = time.perf_counter()
        mine = [int(is_new), *[_NONE, _NONE, *places][-2:]]
        everyones = self.collective.concatenate(np.array([mine], np.int64))
        self.replaced = np.flatnonzero(everyones[:, 0]).tolist()
        common = set.intersection(
            *({self.kept.block(place) for place in row if place != _NONE} for row in everyones[:, 1:].tolist())
        )
        if not common:
            raise RuntimeError(f"{membership.NOTHING_KEPT}: nothing is there to continue from in place")
        state = self.kept.restore(max(place for place in places if self.kept.block(place) == max(common)))
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
    """Make what lets this rank go on where another one has died; None where the launcher holds no spares.

    Args:
        collective: The ranks.
        variables: All that training changes on this rank, of Keras and of TensorFlow, but for what the mode holds
            between two exchanges; the same in its next process.
        mode: Says which states of the ranks go together.
        every_steps: The same as in `Recovery`.
        reset: The same as in `Recovery`.
        uses_kernels: The same as in `Recovery`.
    """
    files = membership.kept_memory()
    if not files:
        return None
    plain = [variable if isinstance(variable, tf.Variable) else variable.value for variable in variables]
    kept = KeptStates(files[:2], [*plain, *mode.between], mode.block)
    return Recovery(collective, kept, every_steps, uses_kernels, reset)
