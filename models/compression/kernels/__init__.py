"""Operations in C++ for codecs on a CPU, built when the project is installed; without them codecs run on TensorFlow's.

Messages and results are those of TensorFlow's operations, up to rounding. All processors give the same digits.
"""

import logging
from functools import cache
from typing import Any

import tensorflow as tf

from models.compression.kernels import build

LIBRARY = build.SOURCES / build.library_name()
CODECS = frozenset({"onebit", "topk", "dgc", "powersgd"})
"""Those that have kernels."""
_disabled = False


def load() -> Any | None:
    """The module of operations; None where there is no library, it does not load or is disabled, or there is a GPU."""
    return None if _disabled or tf.config.get_visible_devices("GPU") else _load()


def disable() -> None:
    """Let codecs that are made from now on do without: for ranks whose results must have the same last digits."""
    global _disabled
    _disabled = True


def or_nothing(tensor: tf.Tensor | None) -> tf.Tensor:
    """What the operations take for a tensor that is not there: an empty one."""
    return tf.zeros((0,), tf.float32) if tensor is None else tensor


def shaped(tensor: tf.Tensor, shape: tuple[int | None, ...]) -> tf.Tensor:
    """The same with its shape, which the operations do not tell when they are traced."""
    tensor.set_shape(shape)
    return tensor


@cache
def _load() -> Any | None:
    log = logging.getLogger(__name__)
    if not LIBRARY.exists():
        # A .zip of --py-files is such a place too: a library cannot be loaded from there.
        log.warning("there is no %s: compression runs without C++ kernels and takes longer", LIBRARY)
        return None
    try:
        return tf.load_op_library(str(LIBRARY))
    except (tf.errors.OpError, OSError) as error:
        log.warning("%s does not load: compression runs without C++ kernels and takes longer: %s", LIBRARY, error)
        return None
