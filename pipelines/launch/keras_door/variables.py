"""Keras 3's variables as Horovod takes them: it knows TensorFlow's only."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def native(variable: Any) -> Any:
    """Return the `tf.Variable` inside a variable of Keras 3, and anything else as it is."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def shared(variables: Iterable[Any]) -> list[Any]:
    """Return the native variables of these, without the states of Keras's random generators.

    A generator's state stays each rank's own, so that dropout differs between ranks. Horovod could not send its type,
    uint32, either.
    """
    return [native(variable) for variable in variables if "seed_generator_state" not in getattr(variable, "name", "")]
