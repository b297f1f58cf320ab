"""From a batch to tensors that a training step can take."""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes; TensorFlow's kernels read memory that is not aligned so with care, or not at all


def image_tensors(images: Mapping[str, NDArray[np.generic]]) -> dict[str, tf.Tensor]:
    """The image groups as tensors on the CPU, over the same memory where that can be (DLPack), else copied.

    The memory is the tensors' as long as one of them lives: the reader does not use it again before.
    """
    return {name: _tensor(image) for name, image in images.items()}


def _tensor(image: NDArray[np.generic]) -> tf.Tensor:
    if image.flags.c_contiguous and image.flags.writeable and image.ctypes.data % _ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(image.__dlpack__())  # type: ignore[misc]
    return tf.convert_to_tensor(image)
