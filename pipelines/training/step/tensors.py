"""The conversion of batches and gradients to tensors that a training step can take."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes; some of TensorFlow's kernels need it, others are faster with it


def image_tensors(images: Mapping[str, NDArray[np.generic]]) -> dict[str, tf.Tensor]:
    """Return the image groups as tensors on the CPU.

    The tensors share the images' memory if DLPack allows it, and are copies otherwise. As long as one of these tensors
    exists, the reader does not reuse the shared memory.
    """
    return {name: _tensor(image) for name, image in images.items()}


def dense(gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> list[tf.Tensor | None]:
    """Convert gradients to dense tensors; lookups in a table, as in embeddings, give slices.

    An exchange needs all tensors in one order with known shapes, and XLA does not support slices.
    """
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]


def _tensor(image: NDArray[np.generic]) -> tf.Tensor:
    if image.flags.c_contiguous and image.flags.writeable and image.ctypes.data % _ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(image.__dlpack__())  # type: ignore[misc]
    return tf.convert_to_tensor(image)
