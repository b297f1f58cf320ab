"""The base of linear codecs, whose payloads an allreduce sums."""

import tensorflow as tf

from models.compression.codec import Memory, Shape


class LinearCodec:
    """Accepts every tensor and does nothing after dense exchanges."""

    compiled = True
    checks_finite = False
    local_clip_norm: float | None = None

    def accepts(self, shape: Shape) -> bool:
        """Accept every shape."""
        return True

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Return the mean unchanged."""
        return mean, memory

    def join_parts(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """Raise an error: a linear codec has no owner state."""
        raise AssertionError(f"a linear codec has no owner state, got parts of shape {parts.shape}")
