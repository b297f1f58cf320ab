"""The state of one rank after its latest steps, in memory that outlives the rank's process."""

import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from pipelines.training.checkpoint.state import TrainingState

_HEAD = struct.Struct("<QQ")
"""Place of the state plus one, 0 while it is being written; and the length of the JSON text behind it."""
_KERNELS = "uses_kernels"
_STEPS = 1 << 40
_NOTHING = -1
_LOOK_SECONDS = 0.2
_ROW = np.dtype([("step", "<i8"), ("loss", "<f8"), ("milliseconds", "<i8"), ("measured", "<f8", (6,))])

StepRow = tuple[int, float, int, NDArray[np.float64]]
"""Optimizer steps done before a step, its loss, milliseconds since 1970, and what the exchange measured."""


def place_of(state: TrainingState) -> int:
    """Return a number that rises from state to state: by the epochs done, then by the steps."""
    return state.epochs_done * _STEPS + state.step


class KeptStates:
    """The latest states of one rank's two latest blocks, each in a file; a state is there as a whole or not at all.

    A block is what a rank does from one exchange with the others to the next: one step, but in local training. Ranks
    may be one block apart when one of them dies: an exchange that broke for some has ended for others. With states of
    two blocks each, there is a block of which all ranks have one.
    """

    def __init__(
        self, files: Sequence[int], variables: Sequence[tf.Variable], block: Callable[[int], int] = lambda step: step
    ) -> None:
        """Take what an earlier process of this rank has kept.

        Args:
            files: Two descriptors of `pipelines.launch.rank.membership.kept_memory`.
            variables: All that training changes on this rank, in an order that the rank's next process has too.
            block: The block of a state after so many optimizer steps; see `pipelines.training.step.mode.Mode`.
        """
        self._files, self._variables, self._block = list(files), list(variables), block

    def block(self, place: int) -> int:
        """The block that a state of this place is in; blocks rise as places do."""
        epochs_done, step = divmod(place, _STEPS)
        return epochs_done * _STEPS + self._block(step)

    def places(self) -> list[int]:
        """Places of the states that are there, the latest last."""
        return sorted(place for place, _ in map(_head, self._files) if place is not None)

    def write(self, state: TrainingState, *, uses_kernels: bool) -> None:
        """Keep the variables as they are now instead of an older state; waits until they are computed.

        Args:
            state: Where this rank stands; its losses are this rank's own.
            uses_kernels: Whether this rank compresses with C++ kernels, as a process must that continues from here.
        """
        file = self._file_for(place_of(state))
        text = json.dumps({"state": asdict(state), _KERNELS: uses_kernels}).encode()
        _write(file, _HEAD.pack(0, 0), 0)
        offset = _write(file, text, _HEAD.size)
        for variable in self._variables:
            offset = _write(file, _bytes_of(variable.read_value()), offset)
        _write(file, _HEAD.pack(place_of(state) + 1, len(text)), 0)

    def _file_for(self, place: int) -> int:
        """The file that is written next: that of the older state, unless only this one is of an earlier block."""
        older, newer = sorted(self._files, key=lambda file: _NOTHING if (at := _head(file)[0]) is None else at)
        old, new = _head(older)[0], _head(newer)[0]
        if old is None or new is None:
            return older
        return newer if self.block(old) < self.block(new) == self.block(place) else older

    def restore(self, place: int) -> TrainingState:
        """Set the variables to a kept state; return where this rank stood."""
        ((file, length),) = [(file, _head(file)[1]) for file in self._files if _head(file)[0] == place]
        content = json.loads(_read(file, length, _HEAD.size))
        offset = _HEAD.size + length
        for variable in self._variables:
            value = np.empty(variable.shape.as_list(), variable.dtype.as_numpy_dtype)
            data = _read(file, value.nbytes, offset)
            offset += value.nbytes
            variable.assign(np.frombuffer(data, value.dtype).reshape(value.shape))
        return TrainingState(**content["state"])


def rank_uses_kernels(files: Sequence[int], *, give_up: Callable[[], bool]) -> bool | None:
    """Wait until the rank's own process has kept a state, and return whether it uses C++ kernels; None: given up."""
    while not give_up():
        for file in files:
            place, length = _head(file)
            if place is not None:
                with suppress(ValueError):  # the next state was written over it meanwhile
                    return bool(json.loads(_read(file, length, _HEAD.size))[_KERNELS])
        time.sleep(_LOOK_SECONDS)
    return None


class KeptRows:
    """What was measured in the steps since the newest checkpoint, in a file in memory."""

    def __init__(self, file: int) -> None:
        """Take the third descriptor of `pipelines.launch.rank.membership.kept_memory`."""
        self._file = file

    def append(self, row: StepRow) -> None:
        """Keep one more step."""
        data = np.array([row], _ROW).tobytes()
        _write(self._file, data, os.fstat(self._file).st_size // _ROW.itemsize * _ROW.itemsize)

    def keep(self, first: int, end: int | None = None) -> None:
        """Forget the steps before the first, and those from the end on."""
        kept = [row for row in self.read() if first <= row[0] and (end is None or row[0] < end)]
        os.ftruncate(self._file, 0)
        for row in kept:
            self.append(row)

    def read(self) -> list[StepRow]:
        """Return all of them, in order."""
        size = os.fstat(self._file).st_size // _ROW.itemsize * _ROW.itemsize
        rows = np.frombuffer(_read(self._file, size, 0), _ROW)
        return [(int(row["step"]), float(row["loss"]), int(row["milliseconds"]), row["measured"]) for row in rows]


def _bytes_of(tensor: tf.Tensor) -> "memoryview[Any]":
    """The tensor's own memory, so that nothing is copied but into the file; a copy of what no buffer can describe."""
    described = tensor.dtype != tf.bfloat16
    value = np.asarray(memoryview(tensor)) if described else tensor.numpy()
    return value.reshape(-1).view(np.uint8).data


def _head(file: int) -> tuple[int | None, int]:
    """The place of the state in a file, None where there is no whole one, and the length of its text."""
    head = os.pread(file, _HEAD.size, 0)
    number, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    return (number - 1 if number else None), length


def _write(file: int, data: "bytes | memoryview[Any]", offset: int) -> int:
    """Write all of it; return where it ends."""
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
