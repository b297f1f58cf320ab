"""Which Keras a module is, and the variables of Keras 3 as Horovod takes them: it knows TensorFlow's only."""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import tensorflow as tf


def is_keras_3(keras: ModuleType) -> bool:
    """Whether a module that calls itself Keras is version 3: not tf_keras, which is version 2."""
    return int(version_of(keras).split(".")[0]) >= 3


def version_of(keras: ModuleType) -> str:
    """The version of such a module; of `tensorflow.keras` in TensorFlow 2.16, which states none, the first number."""
    version = getattr(keras, "__version__", None)
    return str(version or ("2" if keras.__name__.startswith("tf_keras") else "3"))


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
