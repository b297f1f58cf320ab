"""Where a run stands, kept and found again on all ranks together."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.resize import load_state, save_state
from pipelines.launch.report import attempt
from pipelines.training.checkpoint import (
    TrainingState,
    check_rank_states,
    checkpoint_path,
    newest_checkpoint,
    read_rank_states,
    restore,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.collective import HorovodCollective

if TYPE_CHECKING:
    import keras

_log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """The checkpoints of one run; every rank makes the same calls."""

    folder: Path
    initial: TrainingState
    """Of a run that has done nothing yet."""
    variables: Sequence["keras.Variable"]
    """The same on every rank: of model and optimizer."""
    exchange: GradientExchange
    """Built; its state differs from rank to rank."""
    collective: HorovodCollective
    newest: str = ""
    """Path of the newest checkpoint; rank 0 knows it."""

    def restore(self, *, resumes: bool) -> TrainingState:
        """Go on from the newest checkpoint where this run or attempt does; the same variables on every rank.

        Args:
            resumes: Whether there must be a checkpoint.

        Returns:
            Where to go on; history and losses on rank 0 only.

        Raises:
            FileNotFoundError: There is no checkpoint and must be one.
            ValueError: It is of another model, or, within an epoch, of samples in another order.
        """
        state = self.initial
        if self.collective.rank == 0 and (resumes or attempt() > 1):
            state = self._restore_variables(must_be_there=resumes)
        self.collective.broadcast([variable.value for variable in self.variables])
        step, epochs_done, ranks = (
            self.collective.broadcast_number(number) for number in (state.step, state.epochs_done, state.exchange_ranks)
        )
        if self._has_exchange_state and ranks:
            load_state(self.exchange, read_rank_states(checkpoint_path(self.folder, step), ranks))
        return replace(state, step=step, epochs_done=epochs_done)

    def save(
        self,
        *,
        epochs_done: int,
        step: int,
        history: list[dict[str, float]],
        loss_sum: float = 0.0,
        loss_count: int = 0,
    ) -> None:
        """Write a checkpoint, which is there when the last rank's part is.

        Raises:
            RuntimeError: Ranks write to different disks.
        """
        if self._has_exchange_state:
            save_rank_state(self.folder, step, self.collective.rank, save_state(self.exchange))
            self.collective.sum(np.zeros(1))  # every part is there before the checkpoint that counts on them
        if self.collective.rank != 0:
            return
        ranks = self.collective.size if self._has_exchange_state else 0
        check_rank_states(self.folder, step, ranks)
        state = replace(
            self.initial,
            epochs_done=epochs_done,
            step=step,
            history=history,
            loss_sum=loss_sum,
            loss_count=loss_count,
            exchange_ranks=ranks,
        )
        self.newest = str(save_checkpoint(self.folder, state, self.variables))

    @property
    def _has_exchange_state(self) -> bool:
        return bool(self.exchange.codec.collectives)

    def _restore_variables(self, *, must_be_there: bool) -> TrainingState:
        try:
            path, state = newest_checkpoint(self.folder)
        except FileNotFoundError:
            if must_be_there:
                raise
            _log.warning("no checkpoint was written before the failure: attempt %d starts anew", attempt())
            return self.initial
        if state.is_within_an_epoch and state.order != self.initial.order:
            raise ValueError(
                f"{path} was written within an epoch of {state.order}, now it is {self.initial.order}: set reader.name "
                "and reader.cache_limit_gib as they were"
            )
        restore(path, self.variables)
        self.newest = str(path)
        _log.info("going on from %s: epoch %d, step %d", path, state.epochs_done + 1, state.step)
        return state
