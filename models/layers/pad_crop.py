"""Random crops of padded images, and squares that are cut out, as for CIFAR-10."""

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from models.layers.augmentation import SeededAugmentation, gather_pixels
from models.layers.backend import ON_TENSORFLOW
from models.layers.drop import uniform
from models.layers.grids import coarsening, shift_units

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf

FILLS = ("reflect", "zero")
# Bits of a seed: 0 mirrors, 3 to 16 shift down, 17 to 30 shift across.
_DOWN_FROM_BIT, _ACROSS_FROM_BIT, _SHIFT_BITS = 3, 17, 14
_CUTOUT_STREAM = -1


@keras.saving.register_keras_serializable(package="groundswell")
class PadCrop(SeededAugmentation):
    """Pads every sample on all sides and crops it to its original size, at the same place in all image groups.

        down  = unit * floor(n * (seed's bits 3 to 16)  / 2**14) - padding
        across = unit * floor(n * (seed's bits 17 to 30) / 2**14) - padding,   n = 2 * padding / unit + 1

    are the shifts in pixels of the finest group. The unit is the smallest shift that is whole pixels of every group, so
    that no pixel is interpolated and all groups show one scene. It is 1 for a single group, 6 for BigEarthNet's 10, 20
    and 60 m, and 2 for its 10 and 20 m. The padding is a multiple of the unit. If the seed's lowest bit is set, the
    crop is mirrored left to right. The probability of each shift is 1 / n, to 2**-14. Images keep dtype and shape.

    With `cutout`, a square of the crop is then filled with each band's mean over the crop, rounded for integers. The
    square lies inside the image and at the same place in all groups. Every place has the same probability, to 2**-24.

    Args:
        padding: Pixels of the finest group on each side.
        fill: "reflect": the padding is the image mirrored at its border; "zero": stored values of 0.
        mirror: Whether half of the crops are mirrored.
        cutout: Side of the square in pixels of the finest group; a multiple of the unit; 0: none.

    Raises:
        ValueError: another fill, a padding that is not positive, a negative cutout; when built, groups whose grids do
            not fit; when called in training, missing seeds.

    Source: Lee et al. 2015 (deeply-supervised nets) and He et al. 2015, section 4.2, for 4 pixels and the mirror;
    Zagoruyko and Komodakis 2016, section 3, for reflections in the padding; DeVries and Taylor 2017 for the square.
    Differs: the reflection includes the border pixel, since only then all resolutions show the same scene. "zero" is
    the stored value; the first two sources pad after the mean is subtracted. DeVries and Taylor fill with the mean of
    the dataset, which stored pixels do not show, and let a part of the square lie outside.
    """

    def __init__(self, padding: int, fill: str, mirror: bool, cutout: int, **kwargs: Any) -> None:
        super().__init__("augmentation 'pad_crop'", **kwargs)
        if fill not in FILLS:
            raise ValueError(f"fill must be one of {FILLS}, got {fill!r}")
        if padding < 1:
            raise ValueError(f"padding must be at least 1, got {padding}")
        if cutout < 0:
            raise ValueError(f"cutout must be at least 0, got {cutout}")
        self.padding, self.fill, self.mirror, self.cutout = padding, fill, mirror, cutout

    def build(self, images_shape: dict[str, Any], seeds_shape: Any = None) -> None:
        """Check that the shifts and the square fit all groups."""
        sizes = _sizes(images_shape)
        shift_units(sizes, self.padding, "padding")
        shift_units(sizes, self.cutout, "cutout")
        self.built = True

    def augmented(self, images: dict[str, Any], seeds: "tf.Tensor") -> dict[str, Any]:
        """Return the images `(batch, height, width, bands)`, shifted, mirrored and cut out."""
        sizes = _sizes({name: group.shape for name, group in images.items()})
        factors, units = coarsening(sizes), shift_units(sizes, self.padding, "padding")
        down = self._shifts(seeds, _DOWN_FROM_BIT, units[0])
        across = self._shifts(seeds, _ACROSS_FROM_BIT, units[1])
        mirrored = tf.bitwise.bitwise_and(seeds, 1) == 1 if self.mirror else tf.zeros_like(seeds, tf.bool)
        cropped = {}
        for name, group in images.items():
            height, width = sizes[name]
            rows = down[:, tf.newaxis] // factors[name][0] + np.arange(height, dtype=np.int32)
            places = np.arange(width, dtype=np.int32)
            columns = across[:, tf.newaxis] // factors[name][1] + tf.where(
                mirrored[:, tf.newaxis], places[::-1], places
            )
            cropped[name] = _pixels_at(group, rows, columns, self.fill)
        return self._cut_out(cropped, seeds, factors, units) if self.cutout else cropped

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`."""
        return {
            **super().get_config(),
            "padding": self.padding,
            "fill": self.fill,
            "mirror": self.mirror,
            "cutout": self.cutout,
        }

    def _shifts(self, seeds: "tf.Tensor", from_bit: int, unit: int) -> "tf.Tensor":
        """Return shifts in pixels of the finest group, int32 `(batch,)`, each a multiple of the unit."""
        bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(seeds, from_bit), 2**_SHIFT_BITS - 1)
        count = 2 * self.padding // unit + 1
        return unit * tf.bitwise.right_shift(bits * count, _SHIFT_BITS) - self.padding

    def _cut_out(
        self, images: dict[str, Any], seeds: "tf.Tensor", factors: dict[str, tuple[int, int]], units: tuple[int, int]
    ) -> dict[str, Any]:
        """Return the groups with a square of each sample filled with the sample's mean."""
        drawn = uniform(seeds, _CUTOUT_STREAM, 2)
        filled = {}
        for name, group in images.items():
            is_inside = []
            for axis in (0, 1):
                size, factor, unit = group.shape[1 + axis], factors[name][axis], units[axis]
                places = (size * factor - self.cutout) // unit + 1
                first = unit // factor * tf.cast(drawn[:, axis] * places, tf.int32)
                offset = np.arange(size, dtype=np.int32) - first[:, tf.newaxis]
                is_inside.append((offset >= 0) & (offset < self.cutout // factor))
            square = (is_inside[0][:, :, tf.newaxis] & is_inside[1][:, tf.newaxis, :])[..., tf.newaxis]
            mean = tf.reduce_mean(tf.cast(group, tf.float32), axis=(1, 2), keepdims=True)
            fill = tf.cast(tf.round(mean) if group.dtype.is_integer else mean, group.dtype)
            filled[name] = tf.where(square, fill, group)
        return filled


def _sizes(shapes: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (int(shape[1]), int(shape[2])) for name, shape in shapes.items()}


def _pixels_at(images: "tf.Tensor", rows: "tf.Tensor", columns: "tf.Tensor", fill: str) -> "tf.Tensor":
    """Return the pixels at `rows (batch, height)` and `columns (batch, width)`; some may be outside the images."""
    height, width, _ = images.shape[1:]
    row, row_is_inside = _reflected(rows, height)
    column, column_is_inside = _reflected(columns, width)
    sources = tf.reshape(row[:, :, tf.newaxis] * width + column[:, tf.newaxis, :], (-1, height * width))
    is_inside = row_is_inside[:, :, tf.newaxis] & column_is_inside[:, tf.newaxis, :]
    return gather_pixels(images, sources, tf.reshape(is_inside, (-1, height * width, 1)) if fill == "zero" else None)


def _reflected(places: "tf.Tensor", size: int) -> "tuple[tf.Tensor, tf.Tensor]":
    """Return places mirrored into the image, at most one size away, and whether they were inside."""
    is_inside = (places >= 0) & (places < size)
    before = tf.where(places < 0, -1 - places, places)
    return tf.where(before >= size, 2 * size - 1 - before, before), is_inside
