"""The exchange between neighbouring stages of a pipeline: activations go forward, their gradients backward."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from pipelines.training.ranks.collective import HorovodGroup


class Border:
    """The cuts before and after this rank's stage; every rank of its group makes the same calls.

    In a tick every stage that has computed sends to one neighbour, in one alltoall of the group. Tensors are sent as
    bytes, so that half floats can be sent and all values arrive bit for bit.
    """

    def __init__(self, group: HorovodGroup) -> None:
        """Store the group; its ranks are the stages."""
        self._group = group

    def pass_on(
        self,
        sent: tf.Tensor | None,
        to: int,
        arrives: keras.KerasTensor | None,
        samples: int,
        name: str,
    ) -> tf.Tensor | None:
        """Send a tensor to another stage, and return the tensor that this stage receives.

        Args:
            sent: The tensor to send; None: nothing.
            to: Number of the receiving stage.
            arrives: Shape `(None, ...)` and dtype of the received tensor; None: nothing is received.
            samples: Number of samples in a micro-batch.
            name: Name of the operation, the same on all ranks.
        """
        message = tf.zeros([0], tf.uint8) if sent is None else tf.reshape(tf.bitcast(sent, tf.uint8), [-1])
        lengths = [0] * self._group.size
        if sent is not None:
            lengths[to] = int(message.shape[0])
        received = self._group.alltoall(message, tf.constant(lengths, tf.int32), name)
        if arrives is None:
            return None
        dtype = tf.as_dtype(arrives.dtype)
        return tf.bitcast(tf.reshape(received, (samples, *arrives.shape[1:], dtype.size)), dtype)


def border_bytes(borders: Sequence[keras.KerasTensor], samples: int) -> int:
    """Return the total bytes of one micro-batch's tensors at all cuts, in one direction."""
    return sum(samples * math.prod(each.shape[1:]) * tf.as_dtype(each.dtype).size for each in borders)
