"""The version of a Keras module, and the variables of Keras 3 as TensorFlow variables, which Horovod needs."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import tensorflow as tf


def is_keras_3(keras: ModuleType) -> bool:
    """Return whether a module with the name Keras is version 3; tf_keras is version 2."""
    return int(version_of(keras).split(".")[0]) >= 3


def version_of(keras: ModuleType) -> str:
    """Return the version of a Keras module; for `tensorflow.keras` in TensorFlow 2.16, only the first number."""
    version = getattr(keras, "__version__", None)
    return str(version or ("2" if keras.__name__.startswith("tf_keras") else "3"))


def native(variable: Any) -> Any:
    """Return the `tf.Variable` inside a variable of Keras 3, and any other value unchanged."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def shared(variables: Iterable[Any]) -> list[Any]:
    """Return the native variables, without the states of Keras's random generators.

    Each rank keeps its own state of a generator, so that dropout differs between ranks. Horovod cannot send its type,
    uint32, either.
    """
    return [native(variable) for variable in variables if "seed_generator_state" not in getattr(variable, "name", "")]
