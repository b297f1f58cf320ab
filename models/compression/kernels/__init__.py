"""C++ operations for codecs on a CPU, built during the installation.

Without them the codecs use TensorFlow's operations. Messages and results are the same up to rounding. The C++
operations give the same digits on every processor.
"""

from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from models import compiled

LIBRARY = compiled.Library(Path(__file__).parent).path
CODECS = frozenset({"onebit", "topk", "dgc", "powersgd"})
"""Codecs with C++ operations."""
is_disabled = False
"""Whether new codecs use TensorFlow's operations; see `disable`."""


def load() -> Any | None:
    """Return the module of operations; None: the library is missing, fails to load or is disabled, or with a GPU."""
    return None if is_disabled or tf.config.get_visible_devices("GPU") else _load()


def disable() -> None:
    """Make all new codecs use TensorFlow's operations, so that every rank gets the same digits."""
    global is_disabled
    is_disabled = True


def or_nothing(tensor: tf.Tensor | None) -> tf.Tensor:
    """Return the tensor, or the empty tensor that stands for None in the operations."""
    return tf.zeros((0,), tf.float32) if tensor is None else tensor


def shaped(tensor: tf.Tensor, shape: tuple[int | None, ...]) -> tf.Tensor:
    """Return the tensor with its shape set: the operations have no shape inference."""
    tensor.set_shape(shape)
    return tensor


@cache
def _load() -> Any | None:
    return compiled.load(
        LIBRARY,
        tf.load_op_library,
        "compression runs without C++ kernels and takes longer",
        failure=tf.errors.OpError,
    )
