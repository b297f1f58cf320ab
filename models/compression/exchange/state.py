"""The state of an exchange between steps."""

from dataclasses import dataclass

import tensorflow as tf

from models.compression.codec import Shape, StateSpec


@dataclass(frozen=True)
class StateVariable:
    """One entry of `GradientExchange.state`."""

    name: str
    """`<state>/<tensor>`; unique."""
    spec: StateSpec
    tensor_shape: Shape
    variable: tf.Variable
