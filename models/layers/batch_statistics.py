"""Batch normalisation in TensorFlow's fused kernel, by one rank's batch, several ranks' batches or given moments.

Only Keras's TensorFlow backend has these functions; `models.layers.normalisation` describes other backends.
"""

from typing import Any, Protocol

import tensorflow as tf

Normalised = tuple[tf.Tensor, tf.Tensor, tf.Tensor]
"""Normalised images of the images' dtype, and the float32 mean and variance `(channels,)` that normalised them."""


class RankGroup(Protocol):
    """The ranks that normalise with the common statistics of their batches."""

    def sum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sum over the group; the ranks match their calls by the name."""


def normalise_by(
    images: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, epsilon: float
) -> tf.Tensor:
    """Return `gamma * (x - mean) / sqrt(variance + epsilon) + beta`.

    Args:
        images: x, `(batch, height, width, channels)`.
        gamma: Factor, float32 `(channels,)`, like all that follow.
        beta: The offset.
        mean: A constant for the gradients.
        variance: A constant for the gradients.
        epsilon: Added to the variance.
    """
    return tf.raw_ops.FusedBatchNormV3(
        x=images, scale=gamma, offset=beta, mean=mean, variance=variance, epsilon=epsilon, is_training=False
    )[0]


def normalise_by_batch(images: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> Normalised:
    """Normalise with mean and (biased) variance of `images`; the arguments are as for `normalise_by`."""
    nothing = tf.zeros([0], tf.float32)
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images, scale=gamma, offset=beta, mean=nothing, variance=nothing, epsilon=epsilon, is_training=True
    )
    # The kernel returns the unbiased variance, n / (n - 1) times the variance that Keras averages.
    count = _count(images)
    return outputs, mean, variance * (count - 1.0) / count


def normalise_over_ranks(
    images: tf.Tensor,
    gamma: tf.Tensor,
    beta: tf.Tensor,
    shift: tf.Tensor,
    epsilon: float,
    group: RankGroup,
    name: str,
) -> Normalised:
    """Normalise with the statistics of all batches of a group, as one rank with all batches would.

        forward:   n, sum of x - shift, sum of (x - shift)^2            summed over the group: 2 C + 1 floats
        backward:  sum of dy, sum of dy * xhat                          summed over the group: 2 C floats
        dx = gamma / sqrt(variance + epsilon) * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n)

    The gradients of gamma and beta are sums of this rank, like every other gradient before the exchange.

    Args:
        images: This rank's x, `(batch, height, width, channels)`.
        gamma: Float32 `(channels,)`.
        beta: The offset.
        shift: A first estimate of the mean, the same on all ranks, which avoids cancellation for a large mean.
        epsilon: Added to the variance.
        group: The ranks; all ranks make the same calls.
        name: The name of the sums, the same on all ranks and different for every layer.

    Source: Ioffe, Szegedy 2015, for the gradient; Goyal et al. 2017, section 2.3, for statistics per worker.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def normalise(images: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> Any:
        _, own_mean, own_variance = normalise_by_batch(images, gamma, beta, epsilon)
        count, deviation = _count(images), own_mean - shift
        sums = tf.concat([count * deviation, count * (own_variance + deviation**2), count[None]], 0)
        first, second, total = tf.split(group.sum(sums, name), [gamma.shape[0], gamma.shape[0], 1])
        mean = shift + first / total
        variance = tf.maximum(second / total - (first / total) ** 2, 0.0)
        outputs = normalise_by(images, gamma, beta, mean, variance, epsilon)

        def gradient(upstream: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            # This is the gradient for constant mean and variance; the terms of both follow.
            direct, gamma_gradient, beta_gradient, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=upstream,
                x=images,
                scale=gamma,
                reserve_space_1=mean,
                reserve_space_2=variance,
                reserve_space_3=mean,
                epsilon=epsilon,
                is_training=False,
            )
            sums = group.sum(tf.concat([beta_gradient, gamma_gradient], 0), f"{name}_gradient")
            beta_mean, gamma_mean = tf.split(sums / total, 2)
            inverse = tf.math.rsqrt(variance + epsilon)
            factor = gamma * inverse * inverse * gamma_mean
            offset = gamma * inverse * beta_mean - factor * mean
            through_moments = tf.cast(images, tf.float32) * factor + offset
            return tf.cast(tf.cast(direct, tf.float32) - through_moments, images.dtype), gamma_gradient, beta_gradient

        return (outputs, tf.stop_gradient(mean), tf.stop_gradient(variance)), gradient

    outputs, mean, variance = normalise(images, gamma, beta)
    return outputs, mean, variance


def _count(images: tf.Tensor) -> tf.Tensor:
    """Return the number of values per channel."""
    return tf.cast(tf.size(images) // tf.shape(images)[-1], tf.float32)
