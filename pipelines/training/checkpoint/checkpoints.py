"""The checkpoints of a run, which all ranks write and restore together."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.resize import load_state, save_state
from pipelines.launch.rank.report import attempt
from pipelines.storage.folder import Location, StorageError
from pipelines.training.checkpoint.files import (
    Arrays,
    DamagedError,
    check_writable,
    checkpoint_path,
    elsewhere,
    list_checkpoints,
    write_failure,
)
from pipelines.training.checkpoint.scattered import Scattered
from pipelines.training.checkpoint.selection import History
from pipelines.training.checkpoint.settings import check_same_order
from pipelines.training.checkpoint.state import (
    RETAINED,
    RankStates,
    TrainingState,
    all_damaged,
    array_name,
    assign_arrays,
    check_rank_states,
    read_checkpoint,
    read_state,
    readable,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.events import CheckpointWritten, tell
from pipelines.training.ranks.results import Evaluation, Thresholds, thresholds_of

REMEDY = (
    "lower the learning rate (optimizer.learning_rate or learning_rate_per_256), lengthen schedule.warmup, or choose "
    "an exchange.codec of a wider range"
)
"""The advice to users when training diverges."""
_NONE = -1
_OWN = "own/"
_log = logging.getLogger(__name__)


@dataclass
class Checkpoints:
    """The checkpoints of one run; every rank makes the same calls."""

    folder: Location
    initial: TrainingState
    """The state of a run that has not started."""
    variables: Sequence[keras.Variable | Scattered]
    """Variables of model and optimizer. Each is the same on every rank or divided among the ranks."""
    exchange: GradientExchange
    """The exchange, already built; its state differs between ranks."""
    collective: HorovodCollective
    best_step: Callable[[History], int | None] | None = None
    """Returns the step of the checkpoint that is never deleted, from the history. None: there is no such checkpoint."""
    own: Sequence[keras.Variable] = ()
    """Variables of the training mode that differ between ranks."""
    newest: str = ""
    """Path of the newest checkpoint; only rank 0 knows it."""

    def check_folder(self) -> None:
        """Check before the first step that every writing rank can write, and that the checkpoints fit on the disk.

        Raises:
            RuntimeError: The folder cannot be written, is too small, or is a different folder on another rank.
        """
        rank, size = self.collective.rank, self.collective.size if self._has_rank_state else 1
        if rank < size:
            retained = RETAINED + (self.best_step is not None)
            needed = retained + 1 - min(retained, len(list_checkpoints(self.folder))) if rank == 0 else 0
            check_writable(self.folder, needed * self._checkpoint_bytes())
        if size > 1:
            self._check_that_ranks_share_the_folder()

    def restore(self, *, resumes: bool) -> TrainingState:
        """Load the newest checkpoint if this run or attempt resumes; every rank gets the same variables.

        If a checkpoint is damaged, not finite, or lacks the file of a rank, the previous one is tried.

        Args:
            resumes: Whether a checkpoint must exist.

        Returns:
            The state to continue from. Only rank 0 gets history and losses of the checkpoint.

        Raises:
            FileNotFoundError: No checkpoint exists although one must.
            ValueError: The checkpoint is of another model, or was written within an epoch with another sample order.
        """
        state = self.initial
        if resumes or attempt() > 1:
            state = self._restore_newest(must_exist=resumes)
        self.collective.broadcast([each.value for each in self.variables if not isinstance(each, Scattered)])
        step, epochs_done = (self.collective.broadcast_number(number) for number in (state.step, state.epochs_done))
        return replace(state, step=step, epochs_done=epochs_done)

    def save(self, state: TrainingState, evaluations: Mapping[str, Evaluation] = MappingProxyType({})) -> None:
        """Write a checkpoint; it is complete after all ranks have written their parts.

        Args:
            state: The progress of this run, without the fields that the other argument and the ranks decide.
            evaluations: Evaluations of the validation split after an epoch. The checkpoint has their thresholds.

        Raises:
            FloatingPointError: A value is not finite, and nothing is written. The error names rank and step.
            RuntimeError: The files cannot be written, or ranks write to different disks.
        """
        step = state.step
        with self._failures_explained(step):
            # Other ranks free each gathered variable at once. Rank 0 holds all of them until they are written.
            gathered = (
                each.gather(self.collective) if isinstance(each, Scattered) else each for each in self.variables
            )
            wholes = [each for each in gathered if self.collective.rank == 0]
            if self._has_rank_state:
                save_rank_state(self.folder, step, self.collective.rank, rank_state(self.exchange, self.own))
                self.collective.sum(np.zeros(1))  # all parts are written before the checkpoint that needs them
            if self.collective.rank != 0:
                return
            ranks = self.collective.size if self._has_rank_state else 0
            check_rank_states(self.folder, step, ranks)
            state = replace(state, exchange_ranks=ranks, thresholds=thresholds_of(evaluations))
            spared = None if self.best_step is None else self.best_step(state.history)
            self.newest = str(save_checkpoint(self.folder, state, wholes, spared=spared))
            tell(CheckpointWritten(path=self.newest))

    def thresholds(self, step: int) -> Thresholds:
        """Return the thresholds in the checkpoint after `step` steps; none if it cannot be read."""
        path = checkpoint_path(self.folder, step)
        try:
            return read_state(path).thresholds
        except (DamagedError, OSError, StorageError) as error:
            _log.warning("the model gets no thresholds, as checkpoint %s cannot be read: %s", path, error)
            return {}

    def take_best(self, step: int) -> None:
        """Set the variables of this rank to those of the best epoch; the state of the exchange does not change.

        Raises:
            RuntimeError: The checkpoint of the best epoch is missing or damaged.
        """
        path = checkpoint_path(self.folder, step)
        try:
            _, arrays = read_checkpoint(path)
        except DamagedError as error:
            raise RuntimeError(
                f"{path}, the checkpoint of the best epoch, is damaged ({error}): log the last epoch's model with "
                f"training.selection.model=last and training.resume_run={self.initial.run_id}"
            ) from error
        assign_arrays(path, arrays, self.variables)

    def how_to_continue(self) -> str:
        """Return the text that says how to continue this run, and from which checkpoint."""
        written = list_checkpoints(self.folder)
        if not written:
            return "no checkpoint was written yet: start the training again"
        return f"continue from {written[-1]} with training.resume_run={self.initial.run_id}"

    @property
    def _has_rank_state(self) -> bool:
        return bool(self.exchange.codec.collectives) or bool(self.own)

    def _checkpoint_bytes(self) -> int:
        """Return the size of one checkpoint with the exchange states of all ranks, which have the same size."""
        shared = sum(np.prod(variable.shape) * np.dtype(variable.dtype).itemsize for variable in self.variables)
        own = sum(variable.shape.num_elements() * variable.dtype.size for variable in self.exchange.variables)
        own += sum(np.prod(variable.shape) * np.dtype(variable.dtype).itemsize for variable in self.own)
        return int(shared) + (own * self.collective.size if self._has_rank_state else 0)

    def _check_that_ranks_share_the_folder(self) -> None:
        def mark(rank: int) -> str:
            return f".mark.rank-{rank:05d}"

        own = mark(self.collective.rank)
        try:
            self.folder.write(own, b"", flush=False)
            self.collective.sum(np.zeros(1))  # every rank has created its file
            missing = [rank for rank in range(self.collective.size) if not self.folder.is_file(mark(rank))]
            if self.collective.rank == 0 and missing:
                raise RuntimeError(elsewhere(missing[0], self.folder))
            self.collective.sum(np.zeros(1))  # rank 0 has looked
        finally:
            self.folder.remove(own)

    def _restore_newest(self, *, must_exist: bool) -> TrainingState:
        """Restore the newest checkpoint that is valid on every rank; rank 0 reads it, each rank its exchange state."""
        candidates = readable(self.folder, read_checkpoint) if self.collective.rank == 0 else iter(())
        none_left = self.folder, (replace(self.initial, step=_NONE), None)
        unused = [rank_state(self.exchange, self.own)] * self.collective.size if self._has_rank_state else []
        while True:
            path, (found, arrays) = next(candidates, none_left)
            step, ranks = (self.collective.broadcast_number(each) for each in (found.step, found.exchange_ranks))
            if unused and not ranks:  # a newer checkpoint may have failed on one rank only
                load_rank_state(self.exchange, self.own, unused)
            if step == _NONE:
                return self._begin_anew(must_exist=must_exist)
            if self._all_ranks_load_their_state(step, ranks):
                state = self.initial if arrays is None else self._assign(path, found, arrays)
                self._spread(arrays)
                return state

    def _begin_anew(self, *, must_exist: bool) -> TrainingState:
        if self.collective.rank == 0:
            if list_checkpoints(self.folder):
                raise all_damaged(self.folder)
            if must_exist:
                raise FileNotFoundError(
                    f"no checkpoints in {self.folder}: do the workers mount training.output as the driver does?"
                )
            _log.warning(
                "no checkpoint was written before the failure: attempt %d starts from the beginning", attempt()
            )
        return self.initial

    def _all_ranks_load_their_state(self, step: int, ranks: int) -> bool:
        """Load the exchange state of a checkpoint and return whether every rank succeeded."""
        if not ranks:
            return True
        path = checkpoint_path(self.folder, step)
        if not self._has_rank_state:
            raise ValueError(
                f"{path} holds what exchange.codec left to send, and exchange.codec=none would lose it: set "
                "exchange.codec as it was"
            )
        failed = 0
        try:
            load_rank_state(self.exchange, self.own, RankStates(path, ranks))
        except DamagedError as error:
            failed = 1
            _log.warning("checkpoint %s is damaged (%s); trying the one before", path, error)
        return int(self.collective.sum(np.array([failed]))[0]) == 0

    def _assign(self, path: Location, state: TrainingState, arrays: Arrays) -> TrainingState:
        check_same_order(path, state, self.initial.order)
        assign_arrays(path, arrays, self.variables)
        self.newest = str(path)
        _log.info("continuing from %s: epoch %d, step %d", path, state.epochs_done + 1, state.step)
        return state

    def _spread(self, arrays: Arrays | None) -> None:
        """Send every rank its parts of the divided variables, from the arrays of rank 0."""
        for position, variable in enumerate(self.variables):
            if isinstance(variable, Scattered):
                whole = None if arrays is None else arrays[array_name(position, variable)]
                variable.spread(self.collective, whole)

    @contextmanager
    def _failures_explained(self, step: int) -> Iterator[None]:
        """Add rank, step, reason and remedy to an error, and remove the parts of the failed checkpoint."""
        try:
            yield
        except FloatingPointError as error:
            self._remove_parts(step)
            raise FloatingPointError(f"{error} on rank {self.collective.rank} after step {step}: {REMEDY}") from None
        except OSError as error:
            self._remove_parts(step)
            raise RuntimeError(f"{write_failure(self.folder, error)}, then {self.how_to_continue()}") from error
        except StorageError as error:
            newest = f"continue from {self.newest} with" if self.newest else "continue with"
            text = f"cannot write a checkpoint: {error}; then {newest} training.resume_run={self.initial.run_id}"
            raise RuntimeError(text) from error

    def _remove_parts(self, step: int) -> None:
        """Remove the parts of a failed checkpoint, unless an earlier attempt has completed the same checkpoint."""
        if not checkpoint_path(self.folder, step).is_file():
            for part in self.folder.glob(f"step-{step:08d}.rank-*.npz"):
                part.remove()


def rank_state(exchange: GradientExchange, own: Sequence[keras.Variable]) -> Arrays:
    """Return this rank's arrays by name."""
    return save_state(exchange) | {f"{_OWN}{at:04d}/{each.path}": np.asarray(each) for at, each in enumerate(own)}


def load_rank_state(exchange: GradientExchange, own: Sequence[keras.Variable], saved: Sequence[Arrays]) -> None:
    """Set this rank's state from the saved states of all ranks.

    If the number of ranks is the same, each rank gets its own state. If it differs, `own` becomes the mean over the old
    ranks, as do the residuals of the exchange.

    Args:
        exchange: The exchange, already built.
        own: The variables of this rank.
        saved: Results of `rank_state` on the old ranks 0, 1, ...; only one of them is in memory at a time.

    Raises:
        ValueError: The names or shapes are of another model, codec or mode.
    """
    parts = _Parts(saved)
    load_state(exchange, parts)
    if len(parts.sums) != len(own):
        raise ValueError(f"a rank saved {len(parts.sums)} variables of its own, and this training mode has {len(own)}")
    for variable, total in zip(own, parts.sums, strict=True):
        if total.shape != tuple(variable.shape):
            raise ValueError(f"{variable.path} has shape {total.shape} in the checkpoint, and {variable.shape} here")
        variable.assign((total / parts.read).astype(total.dtype) if parts.read > 1 else total)


class _Parts(Sequence[Arrays]):
    """The exchange's part of the saved states; it also sums the other part of each state that is read."""

    def __init__(self, saved: Sequence[Arrays]) -> None:
        self._saved = saved
        self.read = 0
        self.sums: list[NDArray[Any]] = []

    def __len__(self) -> int:
        return len(self._saved)

    def __getitem__(self, rank: int) -> Arrays:  # type: ignore[override]  # no slices
        arrays = self._saved[rank]
        own = [arrays[name] for name in sorted(arrays) if name.startswith(_OWN)]
        self.sums = [total + value for total, value in zip(self.sums, own, strict=True)] if self.read else own
        self.read += 1
        return {name: value for name, value in arrays.items() if not name.startswith(_OWN)}
