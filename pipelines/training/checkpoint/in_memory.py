"""The in-memory checkpoints of one rank, in memory that outlives its process, and the in-place recovery from them."""

import json
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from models.compression.exchange.figures import ExchangeFigures
from pipelines.launch.driver.failure import names_lost_peer
from pipelines.launch.rank import membership
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.step.mode import Mode

_HEAD = struct.Struct("<QQ")
"""The position of the state plus one, or 0 while it is being written; then the length of the JSON text that follows."""
_KERNELS = "uses_kernels"
_STEPS = 1 << 40
_NONE = -1
_LOOK_SECONDS = 0.2
_log = logging.getLogger(__name__)


class StepRow(NamedTuple):
    """One step of rank 0 that is recorded."""

    step: int
    """Number of optimizer steps before it."""
    loss: float
    milliseconds: int
    """Time of its end, since 1970."""
    measured: ExchangeFigures


_ROW = np.dtype(
    [("step", "<i8"), ("loss", "<f8"), ("milliseconds", "<i8"), ("measured", "<f8", len(ExchangeFigures._fields))]
)


def position_of(state: TrainingState) -> int:
    """Return a number that increases from state to state: by the epochs done, then by the steps."""
    return state.epochs_done * _STEPS + state.step


class InMemoryCheckpoints:
    """The latest state in each of one rank's two latest blocks; each is written atomically to its own file.

    A block is the work of a rank between two exchanges with the others: one step, except in local training. Ranks may
    be one block apart when one of them dies, because an exchange may fail on some ranks and succeed on others. Each
    rank has states of two blocks in memory, so all ranks have a state of at least one common block.
    """

    def __init__(
        self, files: Sequence[int], variables: Sequence[tf.Variable], block: Callable[[int], int] = lambda step: step
    ) -> None:
        """Use the states that an earlier process of this rank has written.

        Args:
            files: Two descriptors of `pipelines.launch.rank.membership.shared_memory_files`.
            variables: All variables that training changes on this rank. The rank's next process has the same order.
            block: Returns the block of a state from its steps; see `pipelines.training.step.mode.Mode`.
        """
        self._files, self._variables, self._block = list(files), list(variables), block

    def block(self, position: int) -> int:
        """Return the block of the state at this position; blocks increase with positions."""
        epochs_done, step = divmod(position, _STEPS)
        return epochs_done * _STEPS + self._block(step)

    def positions(self) -> list[int]:
        """Return the positions of the existing states, the latest last."""
        return sorted(position for position, _ in map(_head, self._files) if position is not None)

    def write(self, state: TrainingState, *, uses_kernels: bool) -> None:
        """Replace an older state by the current variables; this waits until they are computed.

        Args:
            state: Progress of this rank, with this rank's own losses.
            uses_kernels: Whether this rank compresses with C++ kernels. A process that continues from here must too.
        """
        file = self._file_for(position_of(state))
        text = json.dumps({"state": asdict(state), _KERNELS: uses_kernels}).encode()
        _write(file, _HEAD.pack(0, 0), 0)
        offset = _write(file, text, _HEAD.size)
        for variable in self._variables:
            offset = _write(file, _bytes_of(variable.read_value()), offset)
        _write(file, _HEAD.pack(position_of(state) + 1, len(text)), 0)

    def _file_for(self, position: int) -> int:
        """Return the file to overwrite: the older one, unless only the newer one is of this state's block."""
        older, newer = sorted(self._files, key=lambda file: _NONE if (at := _head(file)[0]) is None else at)
        old, new = _head(older)[0], _head(newer)[0]
        if old is None or new is None:
            return older
        return newer if self.block(old) < self.block(new) == self.block(position) else older

    def restore(self, position: int) -> TrainingState:
        """Set the variables to the state at this position and return the rank's progress."""
        ((file, length),) = [(file, _head(file)[1]) for file in self._files if _head(file)[0] == position]
        content = json.loads(_read(file, length, _HEAD.size))
        offset = _HEAD.size + length
        for variable in self._variables:
            value = np.empty(variable.shape.as_list(), variable.dtype.as_numpy_dtype)
            variable.assign(np.frombuffer(_read(file, value.nbytes, offset), value.dtype).reshape(value.shape))
            offset += value.nbytes
        return TrainingState(**content["state"])


def rank_uses_kernels(files: Sequence[int], *, give_up: Callable[[], bool]) -> bool | None:
    """Wait for the first state of the rank's own process; return whether it uses C++ kernels, None if given up."""
    while not give_up():
        for file in files:
            position, length = _head(file)
            if position is not None:
                with suppress(ValueError):  # the next state overwrote it during the read
                    return bool(json.loads(_read(file, length, _HEAD.size))[_KERNELS])
        time.sleep(_LOOK_SECONDS)
    return None


class InMemoryRows:
    """The values that were measured in the steps since the newest checkpoint, in a file in memory."""

    def __init__(self, file: int) -> None:
        """Use the third descriptor of `pipelines.launch.rank.membership.shared_memory_files`."""
        self._file = file

    def append(self, row: StepRow) -> None:
        """Append one step."""
        _write(self._file, np.array([row], _ROW).tobytes(), self._size())

    def trim(self, first: int, end: int | None = None) -> None:
        """Drop the steps before `first`, and those from `end` on."""
        remaining = [row for row in self.read() if first <= row.step and (end is None or row.step < end)]
        os.ftruncate(self._file, 0)
        _write(self._file, np.array(remaining, _ROW).tobytes(), 0)

    def read(self) -> list[StepRow]:
        """Return all rows in order."""
        rows = np.frombuffer(_read(self._file, self._size(), 0), _ROW).tolist()
        return [
            StepRow(step, loss, milliseconds, ExchangeFigures(*measured)) for step, loss, milliseconds, measured in rows
        ]

    def _size(self) -> int:
        """Return the bytes of all complete rows."""
        return os.fstat(self._file).st_size // _ROW.itemsize * _ROW.itemsize


def _bytes_of(tensor: tf.Tensor) -> "memoryview[Any]":
    """Return the tensor's own memory without a copy; a copy only for types that no buffer can describe."""
    value = tensor.numpy() if tensor.dtype == tf.bfloat16 else np.asarray(memoryview(tensor))
    return value.reshape(-1).view(np.uint8).data


def _head(file: int) -> tuple[int | None, int]:
    """Return the position of the state in a file, None if it has no complete state, and the length of its text."""
    head = os.pread(file, _HEAD.size, 0)
    number, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    return (number - 1 if number else None), length


def _write(file: int, data: "bytes | memoryview[Any]", offset: int) -> int:
    """Write all data and return the offset of its end."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]
    return offset


def _read(file: int, size: int, offset: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while len(view):
        count = os.preadv(file, [view], offset)
        assert count, "a state that is there is whole"
        offset, view = offset + count, view[count:]
    return data


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
        _log.info(
            "rank %d continues in place after step %d (%.2f s)",
            self.collective.rank,
            state.step,
            time.perf_counter() - began,
        )
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
