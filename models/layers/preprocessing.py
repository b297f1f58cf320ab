"""The layers from stored image groups to one float32 image: normalise, resize to the finest grid, concatenate.

Only built-in Keras layers and operations are used, so that Keras alone can load a saved model.
"""

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

UPSAMPLINGS = ("nearest", "bilinear", "bicubic")
_HEIGHT_AXIS, _WIDTH_AXIS, _BANDS_AXIS = 1, 2, 3


@dataclass(frozen=True)
class InputGroup:
    """Bands that share one pixel grid, as they are stored: `(height, width, bands)` of `dtype`.

    `mean` and `std` hold one value per band, in the units of the stored pixels.

    `channels` has for each band its channel in the joined image, or None if the network does not see the band. Without
    `channels`, all bands of all groups follow each other.

    Raises:
        ValueError: a mean, std or channels of the wrong length, statistics that are not finite, or a negative std.
    """

    name: str
    shape: tuple[int, int, int]
    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        """Check the statistics against the number of bands."""
        bands = self.shape[2]
        for statistic, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != bands:
                raise ValueError(f"{statistic} of group {self.name!r} has {len(values)} values for {bands} bands")
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{statistic} of group {self.name!r} must be finite, got {values}")
        if min(self.std) < 0:
            raise ValueError(f"std of group {self.name!r} must not be negative, got {self.std}")
        if self.channels is not None and len(self.channels) != bands:
            raise ValueError(f"channels of group {self.name!r} has {len(self.channels)} values for {bands} bands")


def preprocess(
    inputs: dict[str, keras.KerasTensor], groups: Sequence[InputGroup], *, upsampling: str
) -> keras.KerasTensor:
    """Join image groups of different resolution into one normalised image.

    Each group becomes `(pixel - mean) / std` in float32 (std 0, a constant band, counts as 1). It is resized to the
    largest height and width of the groups with aligned pixel centres. The groups are concatenated in the order of
    `groups`, or as their `channels` say.

    Args:
        inputs: Images by group name, `(batch, height, width, bands)`.
        groups: Names, shapes and statistics of the inputs.
        upsampling: "nearest", "bilinear" or "bicubic" (Keys, a = -0.5).

    Returns:
        Images `(batch, largest height, largest width, chosen bands)` in float32, under any dtype policy: neither the
        range of uint16 nor its precision fits a half float.

    Raises:
        ValueError: no group, a group name twice or without an input, an unknown upsampling, or channels that are not 0
            to their number, each once.
    """
    names = [group.name for group in groups]
    if not names or len(set(names)) < len(names) or not set(names) <= set(inputs):
        raise ValueError(f"groups must be distinct and among the inputs {sorted(inputs)}, got {names}")
    if upsampling not in UPSAMPLINGS:
        raise ValueError(f"upsampling must be one of {UPSAMPLINGS}, got {upsampling!r}")
    height = max(group.shape[0] for group in groups)
    width = max(group.shape[1] for group in groups)
    images = [
        _resize(_chosen(_normalise(inputs[group.name], group), group), height, width, upsampling, group)
        for group in groups
    ]
    joined = images[0] if len(images) == 1 else keras.layers.Concatenate(dtype="float32", name="bands")(images)
    return _in_order(joined, groups)


def _normalise(images: keras.KerasTensor, group: InputGroup) -> keras.KerasTensor:
    layer = keras.layers.Normalization(
        mean=list(group.mean),
        variance=[value**2 if value > 0 else 1.0 for value in group.std],
        dtype="float32",
        name=f"{group.name}_normalise",
    )
    # Keras takes no deviation below its epsilon.
    least = keras.backend.epsilon()
    if any(0 < value < least for value in group.std):
        return layer(images) * np.array(
            [least / value if 0 < value < least else 1.0 for value in group.std], np.float32
        )
    return layer(images)


def _chosen(images: keras.KerasTensor, group: InputGroup) -> keras.KerasTensor:
    """Return the bands that the network sees, in stored order."""
    bands = [band for band, channel in enumerate(group.channels or ()) if channel is not None]
    if group.channels is None or len(bands) == group.shape[2]:
        return images
    return keras.ops.take(images, np.array(bands, np.int32), axis=_BANDS_AXIS)


def _in_order(joined: keras.KerasTensor, groups: Sequence[InputGroup]) -> keras.KerasTensor:
    """Return the joined image with every band at its channel."""
    if all(group.channels is None for group in groups):
        return joined
    channels = [channel for group in groups for channel in group.channels or () if channel is not None]
    if sorted(channels) != list(range(joined.shape[_BANDS_AXIS])):
        raise ValueError(f"channels must be 0 to their number, each once, got {channels}")
    order = np.argsort(channels).astype(np.int32)
    return joined if channels == sorted(channels) else keras.ops.take(joined, order, axis=_BANDS_AXIS)


def _resize(
    images: keras.KerasTensor, height: int, width: int, upsampling: str, group: InputGroup
) -> keras.KerasTensor:
    if group.shape[:2] == (height, width):
        return images
    factors = (height // group.shape[0], width // group.shape[1])
    if upsampling == "nearest" and height % group.shape[0] == 0 and width % group.shape[1] == 0:
        return keras.layers.UpSampling2D(factors, dtype="float32", name=f"{group.name}_upsample")(images)
    # keras.layers.Resizing fails under XLA (TensorFlow 2.21): bicubic does not exist, and bilinear gives wrong pixels
    # at factors that are not whole. Weighted sums of gathered rows and columns compile correctly.
    images = _resize_axis(images, _HEIGHT_AXIS, group.shape[0], height, upsampling)
    return _resize_axis(images, _WIDTH_AXIS, group.shape[1], width, upsampling)


def _resize_axis(
    images: keras.KerasTensor, axis: int, size_in: int, size_out: int, upsampling: str
) -> keras.KerasTensor:
    if size_in == size_out:
        return images
    if upsampling == "nearest":
        nearest = np.floor((np.arange(size_out) + 0.5) * size_in / size_out).astype(np.int32)
        return keras.ops.take(images, nearest, axis=axis)
    return sum_of_taps(images, axis, *_taps(size_in, size_out, upsampling))


def sum_of_taps(images: Any, axis: int, indexes: NDArray[np.int32], weights: NDArray[np.float32]) -> Any:
    """Return weighted sums of gathered rows or columns, an operation that XLA compiles.

    Args:
        images: `(batch, height, width, bands)`.
        axis: 1 for rows, 2 for columns.
        indexes: Source of each tap of each row or column of the result, `(taps, size)`.
        weights: Weight of each tap, `(taps, size)`.
    """
    trailing_axes = (1,) * (_WIDTH_AXIS + 1 - axis)
    return functools.reduce(
        operator.add,
        (
            keras.ops.take(images, index, axis=axis) * weight.reshape(-1, *trailing_axes)
            for index, weight in zip(indexes, weights, strict=True)
        ),
    )


def _taps(size_in: int, size_out: int, upsampling: str) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return source pixels and their weights, each `(taps, size_out)`, as tf.image.resize defines them.

    Output pixel i looks at source position p = (i + 0.5) * size_in / size_out - 0.5. Taps outside the image get
    weight 0, and the others are scaled to sum to 1.
    """
    position = (np.arange(size_out) + 0.5) * size_in / size_out - 0.5
    reach = 1 if upsampling == "bilinear" else 2
    index = np.floor(position) + np.arange(1 - reach, reach + 1)[:, np.newaxis]
    distance = np.abs(position - index)
    kernel = np.maximum(1.0 - distance, 0.0) if upsampling == "bilinear" else _keys_cubic(distance)
    weight = np.where((index >= 0) & (index < size_in), kernel, 0.0)
    weight /= weight.sum(axis=0)
    return np.clip(index, 0, size_in - 1).astype(np.int32), weight.astype(np.float32)


def _keys_cubic(distance: NDArray[Any]) -> NDArray[Any]:
    """Return the kernel of cubic convolution with a = -0.5 (Keys 1981, equation 15)."""
    near = 1.5 * distance**3 - 2.5 * distance**2 + 1.0
    far = -0.5 * distance**3 + 2.5 * distance**2 - 4.0 * distance + 2.0
    return np.where(distance <= 1.0, near, np.where(distance < 2.0, far, 0.0))
