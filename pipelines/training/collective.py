"""Horovod's operations behind the interface that the exchange and the evaluation know."""

import os
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


class HorovodCollective:
    """All ranks of this Horovod job; every rank must call the same operations in the same order."""

    def __init__(self) -> None:
        """Join the job."""
        # Groups that are under way at the same time would otherwise be summed together or not, as they meet: other
        # orders of the sums, hence other last digits, from run to run.
        os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
        # Ranks tell each other in every cycle what is ready, work or not: every millisecond, Horovod's default, that is
        # 0.4 MB/s and takes 6 % of a rank's only core. GPUs compute beside it: there the default stays.
        if not tf.config.get_visible_devices("GPU"):
            os.environ.setdefault("HOROVOD_CYCLE_TIME", "5")
        hvd.init()

    @property
    def rank(self) -> int:
        """This process among all."""
        return int(hvd.rank())

    @property
    def size(self) -> int:
        """Processes in the job."""
        return int(hvd.size())

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        """Sum each tensor over the ranks, all of them in one grouped operation.

        Ranks find each other's operation by its name. Horovod's own follow the graph, which must then be the same on
        all ranks to the last node.
        """
        if self.size == 1:
            return list(tensors)
        return list(hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name))

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        """Send one section of the first axis to each rank, of equal lengths or as `splits` says."""
        if self.size == 1:
            return tf.identity(tensor)
        if splits is None:
            return hvd.alltoall(tensor, name=name)
        received, _ = hvd.alltoall(tensor, splits=splits, name=name)
        return received

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """The ranks' tensors one after the other, in rank order; the first axis may differ."""
        return tf.identity(tensor) if self.size == 1 else hvd.allgather(tensor, name=name)

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sum of one array over the ranks, outside a graph."""
        if self.size == 1:
            return values
        return np.asarray(hvd.allreduce(tf.constant(values), op=hvd.Sum))

    def concatenate(self, values: NDArray[Any]) -> NDArray[Any]:
        """The ranks' arrays one after the other, in rank order; the first axis may differ."""
        if self.size == 1:
            return values
        return np.asarray(hvd.allgather(tf.constant(values)))

    def broadcast(self, variables: list[tf.Variable]) -> None:
        """Set the variables to rank 0's values."""
        if self.size > 1:
            hvd.broadcast_variables(variables, root_rank=0)

    def broadcast_number(self, value: int) -> int:
        """Rank 0's value."""
        if self.size == 1:
            return value
        return int(hvd.broadcast(tf.constant(value, tf.int64), root_rank=0))


def use_assigned_devices() -> None:
    """Let TensorFlow grow its memory on the GPU that the launcher made visible.

    Raises:
        RuntimeError: There is one, and TensorFlow does not see it.
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
