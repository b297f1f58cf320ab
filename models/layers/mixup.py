"""Mixup: samples as weighted means of two samples, drawn without state, the same on any number of ranks."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models.layers.augmentation import augmentation_seeds
from models.layers.backend import ON_TENSORFLOW, require_tensorflow

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf

_FIRST_STREAM = 2**32
"""Offset of mixup's seeds; seeds of a training are below it, so that augmentation draws other numbers."""


def mixing_coefficients(alpha: float, *, seed: int, epoch: int, rows: ArrayLike) -> NDArray[np.float32]:
    """Draw the weight of each sample in its mixture from Beta(alpha, alpha).

    It is a pure function of the training's seed, the epoch and the sample's row.

        with u, v uniform in (0, 1):  x = u^(1/alpha),  y = v^(1/alpha);  x / (x + y) if x + y <= 1, else draw again

    Args:
        alpha: Shape of the distribution, in (0, 1]; the smaller, the nearer to 0 or 1 most weights are.
        seed: Seed of the training, in [0, 2**32).
        epoch: Number of the epoch.
        rows: Row of each sample in the dataset's split.

    Returns:
        Weights in [0, 1], of the shape of `rows`.

    Raises:
        ValueError: alpha out of range.

    Source: Jöhnk 1964, for the beta distribution from uniform numbers.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    shape = np.shape(rows)
    coefficients, drawn, stream = np.zeros(shape), np.zeros(shape, bool), _FIRST_STREAM + seed
    while not drawn.all():
        # Logarithms are used because powers of a small alpha exceed the range of floats.
        log_x = np.log(_uniform(stream, epoch, rows)) / alpha
        log_y = np.log(_uniform(stream + _FIRST_STREAM, epoch, rows)) / alpha
        accepted = ~drawn & (np.logaddexp(log_x, log_y) <= 0)
        coefficients = np.where(accepted, np.exp(-np.logaddexp(0.0, log_y - log_x)), coefficients)
        drawn |= accepted
        stream += 2 * _FIRST_STREAM
    return coefficients.astype(np.float32)


def mix_pairs(values: "tf.Tensor", coefficients: "tf.Tensor") -> "tf.Tensor":
    """Return, for each sample of a batch, c * (its value) + (1 - c) * (its partner's).

    Partners are neighbours: samples 0 and 1, 2 and 3, and so on. Every epoch has a new random order, so these pairs are
    as random as any others. They do not depend on how a global batch is divided into batches of even size.

    Args:
        values: `(batch, ...)`, of an even batch size; images in any stored dtype, or targets in float32.
        coefficients: c, float32 `(batch,)`.

    Returns:
        Values of the shape and dtype of `values`; integers are rounded to the nearest.

    Raises:
        ValueError: Keras's backend is not TensorFlow.

    Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", equation 2.
    Differs: every sample has its own c; the authors' code has one per batch. Stored pixels are mixed, not normalised
    ones. All steps from pixels to the network's input are linear and keep a constant, so the result is the same up to
    the rounding of half a stored unit. The mixture is then augmented as one image.
    """
    require_tensorflow("mixup")
    mixed = tf.cast(values, tf.float32)
    pairs = tf.reshape(mixed, (-1, 2, *values.shape[1:]))
    partners = tf.reshape(tf.reverse(pairs, [1]), tf.shape(mixed))
    weights = tf.reshape(coefficients, (-1, *(1,) * (len(values.shape) - 1)))
    mixed = weights * mixed + (1.0 - weights) * partners
    return tf.cast(tf.round(mixed) if values.dtype.is_integer else mixed, values.dtype)


def _uniform(stream: int, epoch: int, rows: ArrayLike) -> NDArray[np.float64]:
    bits = augmentation_seeds(stream, epoch, rows).view(np.uint32)
    return (bits + 0.5) / 2.0**32
