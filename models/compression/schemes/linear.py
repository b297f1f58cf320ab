"""What codecs share whose payloads are summed by an allreduce."""

import tensorflow as tf

from models.compression.codec import Memory, Shape


class LinearCodec:
    """No conditions on the tensor, nothing to do after dense exchanges."""

    compiled = True
    checks_finite = False
    local_clip_norm: float | None = None

    def accepts(self, shape: Shape) -> bool:
        """Any."""
        return True

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """The mean."""
        return mean, memory

    def join_parts(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """There are none."""
        raise AssertionError(f"no owner slots, got parts of shape {parts.shape}")
