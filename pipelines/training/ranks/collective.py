"""Horovod's operations with the interface that exchange and evaluation use."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from pipelines.launch.rank import membership

_ALONE = {
    **{f"HOROVOD_{scope}RANK": "0" for scope in ("", "LOCAL_", "CROSS_")},
    **{f"HOROVOD_{scope}SIZE": "1" for scope in ("", "LOCAL_", "CROSS_")},
    "HOROVOD_DISABLE_GROUP_FUSION": "1",
}
"""The variables of a job with one rank."""
_OF_GLOO = {"HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "HOROVOD_HOSTNAME", "HOROVOD_GLOO_IFACE"}


@contextmanager
def _settings(group_size: int) -> Iterator[None]:
    """Set Horovod's variables while it starts and reads them; variables that the user has set do not change."""
    # Without this setting, timing decides whether concurrent groups are summed together or separately. The order of the
    # sums, and so their last digits, would differ between runs.
    settings = {"HOROVOD_DISABLE_GROUP_FUSION": "1"}
    # In every cycle the ranks report which tensors are ready, even if there are none. Horovod's default cycle of one
    # millisecond costs 0.4 MB/s and 6 % of a rank's only core. The default stays in three cases:
    # * With a GPU, which computes during the cycles.
    # * If every layer waits for a sum over its group, which takes a cycle or two.
    # * With spares. If a cycle is set, Horovod 0.28 gives ranks that join again another size of the fusion buffer than
    #   a spare. The ranks would then exchange different tensors.
    if not (tf.config.get_visible_devices("GPU") or group_size > 1 or membership.shared_memory_files()):
        settings[membership.CYCLE_TIME] = "5"
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def job_of_one() -> Iterator[None]:
    """Let this process be the only rank of a Horovod job, before it joins the job of the other ranks.

    Only those variables of Horovod stay that concern Gloo on this host. A timeline would overwrite that of the
    ranks, and a cycle time would stay until they join.

    Raises:
        ValueError: Horovod does not start.
    """
    before = {name: os.environ[name] for name in os.environ if name.startswith("HOROVOD_")}
    for name in before.keys() - _OF_GLOO:
        del os.environ[name]
    os.environ.update(_ALONE)
    try:
        hvd.init()
        yield
    finally:
        hvd.shutdown()
        for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
            del os.environ[name]
        os.environ.update(before)


class _Operations:
    """The operations of some ranks of the job; all of them must call the same ones in the same order."""

    size: int
    ranks: hvd.ProcessSet | None
    """Horovod's object; None for only this rank."""

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        """Sum each tensor over the ranks, in one grouped operation.

        The ranks match their operations by name. Without a name Horovod derives one from the graph, which must then be
        the same on all ranks.
        """
        if self.size == 1:
            return list(tensors)
        return list(hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name, process_set=self.ranks))

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        """Send one section of the first axis to each rank, with equal lengths or the lengths in `splits`."""
        if self.size == 1:
            return tf.identity(tensor)
        if splits is None:
            return hvd.alltoall(tensor, name=name, process_set=self.ranks)
        received, _ = hvd.alltoall(tensor, splits=splits, name=name, process_set=self.ranks)
        return received

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Concatenate the ranks' tensors in rank order; their first axes may differ."""
        return tf.identity(tensor) if self.size == 1 else hvd.allgather(tensor, name=name, process_set=self.ranks)


class HorovodCollective(_Operations):
    """All ranks of this Horovod job; every rank must call the same operations in the same order."""

    ranks = hvd.global_process_set

    def __init__(self, group_size: int = 1, *, has_peers: bool = False) -> None:
        """Join the job; a spare process joins it later, with `join`.

        Args:
            group_size: Number of consecutive ranks in a `group`. It divides the number of ranks and is the same on
                every rank.
            has_peers: Whether the ranks with the same number in their groups also form a group, called `peers`.
        """
        self.rank, self.size = rank_of_job(), ranks_of_job()
        assert self.size % group_size == 0, "the driver checks that groups divide the ranks"
        number, position = divmod(self.rank, group_size)
        self.group = HorovodGroup(position, group_size)
        """The group of this rank."""
        self.peers = HorovodGroup(number, self.size // group_size) if has_peers else HorovodGroup(0, 1)
        """The ranks with the same number in their groups, in group order; without `has_peers` only this rank."""
        if not membership.is_spare():
            self.join()

    def join(self, progress: int = 0) -> None:
        """Join the job at the start or after a rank has died.

        Args:
            progress: Progress of this rank; see `pipelines.launch.rank.membership.join`.
        """
        membership.join(progress)
        size = self.group.size
        with _settings(size):
            if size in (1, self.size):
                hvd.init()
                self.group.ranks = None if size == 1 else hvd.global_process_set
                return
            # All groups are made when the ranks join. Each has its own ring, so no group waits for another one.
            groups = [hvd.ProcessSet(list(range(start, start + size))) for start in range(0, self.size, size)]
            crossed = [hvd.ProcessSet(list(range(start, self.size, size))) for start in range(size)]
            hvd.init(process_sets=[*groups, *(crossed if self.peers.size > 1 else [])])
            self.group.ranks = groups[self.rank // size]
            self.peers.ranks = crossed[self.rank % size] if self.peers.size > 1 else None

    def reducescatter(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Sum a tensor `(n,)` over the ranks and return this rank's part; the first n modulo N ranks get one more."""
        if self.size == 1:
            return tf.identity(tensor)
        # The tensor has its own group. If it were grouped with others, timing would change the order of the sums.
        # Horovod's public function for groups takes no name.
        (part,) = hvd._grouped_reducescatter([tensor], name=name, op=hvd.Sum)
        return part

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum one array over the ranks, outside a graph."""
        if self.size == 1:
            return values
        return np.asarray(hvd.allreduce(tf.constant(values), op=hvd.Sum))

    def concatenate(self, values: NDArray[Any]) -> NDArray[Any]:
        """Concatenate the ranks' arrays in rank order; their first axes may differ."""
        return np.asarray(self.allgather(tf.constant(values)))

    def broadcast(self, variables: list[tf.Variable], root: int = 0) -> None:
        """Set the variables, including the states of random generators, to the values of one rank."""
        if self.size == 1:
            return
        # Horovod does not support uint32, the type of these states. The launcher's Keras support does not send them.
        states = [position for position, each in enumerate(variables) if each.dtype == tf.uint32]
        sent = {position: tf.Variable(tf.bitcast(variables[position], tf.int32)) for position in states}
        hvd.broadcast_variables([sent.get(position, each) for position, each in enumerate(variables)], root_rank=root)
        for position, bits in sent.items():
            variables[position].assign(tf.bitcast(bits, tf.uint32))

    def broadcast_number(self, value: int) -> int:
        """Return rank 0's value."""
        return int(self.concatenate(np.array([value], np.int64))[0])


class HorovodGroup(_Operations):
    """Some ranks of the job; all of them must call the same operations in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        """Describe a group of `size` ranks that have not joined yet; `rank` is this rank's number in it."""
        self.rank, self.size = rank, size
        self.ranks = None  # until they have joined

    def sum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum over the group; its ranks match their calls by name."""
        if self.size == 1:
            return values
        return hvd.allreduce(values, op=hvd.Sum, name=name, process_set=self.ranks)


def gather_json(value: Any, collective: HorovodCollective) -> list[Any]:
    """Return the value of every rank, in rank order; all ranks call this together.

    Args:
        value: Any value that JSON can represent.
        collective: The ranks.
    """
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = collective.concatenate(np.array([len(data)], np.int64))
    texts = np.split(collective.concatenate(data), np.cumsum(lengths)[:-1])
    return [json.loads(text.tobytes()) for text in texts]


def own_address() -> str:
    """Return the address at which other hosts reach this one; Horovod's Gloo also binds to it."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # a host that cannot resolve its own name can only be reached from itself
        return "127.0.0.1"


def rank_of_job() -> int:
    """Return the number of this process in the job, which is known before it joins."""
    return int(os.environ.get("HOROVOD_RANK", "0"))


def ranks_of_job() -> int:
    """Return the number of processes in the job, which is known before they join."""
    return int(os.environ.get("HOROVOD_SIZE", "1"))


def ranks_on_host() -> int:
    """Return the number of processes of the job on this host."""
    return int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))


def use_assigned_devices() -> None:
    """Let TensorFlow grow its memory on the GPU that the launcher made visible.

    Raises:
        RuntimeError: The launcher assigned a GPU, but TensorFlow does not see it.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "-1")
    if visible == "-1":
        return
    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        raise RuntimeError(
            f"this worker was given GPU {visible} but TensorFlow sees none: install the GPU environment (docker/), or "
            "set launch.gpus_per_worker=0"
        )
    for device in devices:
        tf.config.experimental.set_memory_growth(device, True)
