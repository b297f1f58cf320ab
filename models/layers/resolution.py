"""Smaller images in training: the network after this layer computes less, with the same weights."""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from models.layers.drop import within
from models.layers.grids import Size
from models.layers.preprocessing import sum_of_taps

_SIZE: ContextVar[Size | None] = ContextVar("training_size", default=None)


def training_size(size: Size | None) -> AbstractContextManager[None]:
    """Make `TrainingResolution` return images of this size to all calls inside; None: images keep their size.

    The size is no input of the network, so that the served model takes only images. It is a constant of the graph: a
    function that is traced inside must be traced again for another size.
    """
    return within(_SIZE, size)


@keras.saving.register_keras_serializable(package="groundswell")
class TrainingResolution(keras.layers.Layer):  # type: ignore[misc]
    """Averages images to the size of `training_size` in training; otherwise it does not change them.

    The layer follows the layer that joins the bands. There one mean over pixels holds for all image groups, whatever
    their resolution is. Augmentation and normalisation precede it: shifts are those of the full image, and their cost
    is small compared with a network. Images are float32 under any dtype policy. A saved model has Keras's own
    `Identity` instead: see `models.layers.normalisation.plain_layers`.

    It pays where the network takes most of the time of a step. Epochs must be long compared with the compilation of a
    step for each size. A quarter of the pixels saves less than three quarters of the time, because small layers and
    the update of the weights stay. When it does not pay: reading or the exchange bounds the step, or objects have few
    pixels. Scores on full images are lower while the network is trained on smaller ones.

    Source: Howard et al. 2018 (fast.ai's entry of DAWNBench, ImageNet at 128, 224 and 288 pixels) for growing images;
    Touvron et al. 2019 ("Fixing the train-test resolution discrepancy") for the last epochs at the size of the test.
    """

    def __init__(self, **kwargs: Any) -> None:
        # There is no autocast: half floats do not have the precision of stored pixels.
        super().__init__(autocast=False, dtype="float32", **kwargs)
        self.built = True

    def call(self, images: Any, training: bool | None = None) -> Any:
        """Return the images `(batch, height, width, bands)`; in training of another height and width."""
        size = _SIZE.get()
        return images if size is None or not training else area_mean(images, size)

    def compute_output_spec(self, images: Any, training: Any = None) -> Any:
        """Return the shape and dtype of the images, for which the following network is built."""
        return keras.KerasTensor(images.shape, images.dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`."""
        return {"name": self.name, "trainable": self.trainable}

    def plain(self) -> keras.layers.Layer:
        """Return Keras's own layer that does nothing."""
        return keras.layers.Identity(dtype="float32", name=self.name)


def accept_any_size(model: keras.Model) -> None:
    """Make the models within a model accept images of any size: Keras fixes the size at their construction.

    The layers are not checked: a convolutional network accepts any size, a dense layer of pixels does not.
    """
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.Model):
            layer.input_spec = None


def area_mean(images: Any, size: Size) -> Any:
    """Return smaller images; each pixel is the mean over the area that it covers.

        out[i, j] = sum over p, q of overlap(p, i) * overlap(q, j) * in[p, q] / area,  area = (H / h) * (W / w)

    If the factor is a whole number, these are means over whole pixels.

    Args:
        images: `(batch, H, W, bands)` in float32, H and W known.
        size: h and w, at most H and W.

    Raises:
        ValueError: a size above that of the images, or below one pixel.
    """
    full = images.shape[1], images.shape[2]
    if not all(1 <= small <= large for small, large in zip(size, full, strict=True)):
        raise ValueError(f"images of {full[0]} x {full[1]} pixels cannot be averaged to {size[0]} x {size[1]}")
    if full == tuple(size):
        return images
    if full[0] % size[0] == 0 and full[1] % size[1] == 0:
        factors = full[0] // size[0], full[1] // size[1]
        return keras.ops.average_pool(images, factors, strides=factors, padding="valid", data_format="channels_last")
    shorter = sum_of_taps(images, 1, *_taps(full[0], size[0]))
    return sum_of_taps(shorter, 2, *_taps(full[1], size[1]))


def _taps(size_in: int, size_out: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return source pixels and their weights, each `(taps, size_out)`.

    The unit is 1 / size_out of a source pixel. Output pixel i covers i * size_in to (i + 1) * size_in. Source pixel p
    covers p * size_out to (p + 1) * size_out.
    """
    begin = np.arange(size_out) * size_in
    end = begin + size_in
    first = begin // size_out
    count = int((-(-end // size_out) - first).max())
    index = first + np.arange(count)[:, np.newaxis]
    overlap = np.minimum(end, (index + 1) * size_out) - np.maximum(begin, index * size_out)
    return np.minimum(index, size_in - 1).astype(np.int32), (np.maximum(overlap, 0) / size_in).astype(np.float32)
