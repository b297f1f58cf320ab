"""A first convolution that whitens the patches of training images: its filters are computed, not trained."""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from models.layers.augmentation import AugmentedModel

LAYER = "whitening"
"""Name of the whitening layer; a network has at most one."""
_EPSILON = 5e-4
"""Number added to each direction's variance, which limits the noise; a band's variance is about 1."""
_LONGEST_SIDE = 512
"""Pixels of an image, down and across, from which patches are taken."""


def whitening_convolution(images: keras.KerasTensor, kernel_size: int, *, dtype: str | None) -> keras.KerasTensor:
    """Map images `(batch, height, width, bands)` to `(batch, height - k + 1, width - k + 1, 2 * k * k * bands)`.

    The kernel `(k, k, bands, 2 * k * k * bands)` is random until `whiten` sets it, and is never trained.

    Args:
        images: Normalised images.
        kernel_size: Side k of a patch in pixels, at least 1.
        dtype: Keras dtype policy of the layer.
    """
    filters = 2 * kernel_size**2 * images.shape[-1]
    return keras.layers.Conv2D(filters, kernel_size, use_bias=False, trainable=False, dtype=dtype, name=LAYER)(images)


def whiten(model: keras.Model, batches: Iterable[Mapping[str, NDArray[Any]]]) -> None:
    """Set the filters of a model's whitening convolution from some stored images.

    Args:
        model: A model with a whitening layer.
        batches: Training images by image group, `(samples, height, width, bands)`; several hundred thousand pixels are
            enough.

    Raises:
        ValueError: no images, or pixels that are not finite.
    """
    network = model.network if isinstance(model, AugmentedModel) else model
    layer = network.get_layer(LAYER)
    before = keras.Model(network.input, layer.input)
    products, patches = np.zeros(()), 0
    for images in batches:
        seen = np.asarray(before({name: images[name] for name in network.input}))[:, :_LONGEST_SIDE, :_LONGEST_SIDE]
        each = patches_of(seen.astype(np.float64), layer.kernel_size[0])
        products, patches = products + each.T @ each, patches + len(each)
    if not patches:
        raise ValueError("a whitening convolution needs training images: got none")
    layer.kernel.assign(whitening_filters(products / patches).reshape(layer.kernel.shape))


def patches_of(images: NDArray[np.float64], kernel_size: int) -> NDArray[np.float64]:
    """Return all patches, `(patches, k * k * bands)`, flat as in a kernel.

    Args:
        images: `(samples, height, width, bands)`.
        kernel_size: Side k of a patch in pixels.
    """
    k, bands = kernel_size, images.shape[-1]
    down, across = images.shape[1] - k + 1, images.shape[2] - k + 1
    shifted = [images[:, row : row + down, column : column + across] for row in range(k) for column in range(k)]
    patches: NDArray[np.float64] = np.stack(shifted, axis=3).reshape(-1, k * k * bands)
    return patches


def whitening_filters(covariance: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return filters whose responses to patches are uncorrelated, with variances of about 1.

        C = mean over all patches p of p p^T = V diag(v) V^T,   f_i = V_i / sqrt(v_i + epsilon)

    Directions with large variance come first. Every filter occurs twice, as f and then as -f, so that an activation
    that sets negative values to 0 loses nothing.

    Args:
        covariance: C, `(n, n)`.

    Returns:
        Filters in columns, `(n, 2 n)`.

    Raises:
        ValueError: values that are not finite.

    Source: Page 2019, "How to train your ResNet", part 8; Jordan 2024, "94 % on CIFAR-10 in 3.29 seconds", section 3.2,
    for both signs and epsilon.
    """
    if not np.all(np.isfinite(covariance)):
        raise ValueError(
            "some training images have pixels that are not finite, and a whitening convolution needs finite ones: "
            "choose another model.name, or prepare the dataset without these images"
        )
    variances, directions = np.linalg.eigh(covariance)
    # Rounding can make the variance of a constant band slightly negative.
    filters = (directions / np.sqrt(np.maximum(variances, 0.0) + _EPSILON))[:, ::-1]
    both: NDArray[np.float32] = np.concatenate([filters, -filters], axis=1).astype(np.float32)
    return both
