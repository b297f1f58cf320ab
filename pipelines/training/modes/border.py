"""What goes from a stage of a pipeline to its neighbours: activations forward, their gradients backward."""

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from pipelines.training.ranks.collective import HorovodGroup


class Border:
    """The cuts before and after this rank's stage; every rank of its group makes the same calls.

    In a tick every stage that has computed sends to one neighbour, in one alltoall of the group. Tensors travel as
    bytes, so that half floats do too, and no digit changes.
    """

    def __init__(self, group: HorovodGroup) -> None:
        """Store the group, whose ranks are the stages."""
        self._group = group

    def pass_on(
        self,
        sent: tf.Tensor | None,
        to: int,
        arrives: keras.KerasTensor | None,
        samples: int,
        name: str,
    ) -> tf.Tensor | None:
        """Send a tensor to another stage, and return what another one has sent here.

        Args:
            sent: What goes on; None: nothing.
            to: Number of the stage that gets it.
            arrives: Shape `(None, ...)` and dtype of what comes; None: nothing does.
            samples: Samples of a micro-batch.
            name: The same on all ranks.
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
    """Return the bytes of one micro-batch's tensors at all cuts together, in one direction."""
    return sum(samples * math.prod(each.shape[1:]) * tf.as_dtype(each.dtype).size for each in borders)
