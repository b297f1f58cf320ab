"""The conversion of images to tensors that a training step can take."""

from collections.abc import Mapping

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


def _tensor(image: NDArray[np.generic]) -> tf.Tensor:
    if image.flags.c_contiguous and image.flags.writeable and image.ctypes.data % _ALIGNMENT == 0:
        return tf.experimental.dlpack.from_dlpack(image.__dlpack__())  # type: ignore[misc]
    return tf.convert_to_tensor(image)
