"""The interface of a codec: what travels in place of a gradient."""

from typing import Protocol

import tensorflow as tf


class Codec(Protocol):
    """Turns a gradient into a payload and back.

    `linear` says that payloads may be summed over ranks before they are decoded:
    decode(encode(a) + encode(b)) = decode(encode(a)) + decode(encode(b)), up to rounding.
    """

    name: str
    linear: bool

    def encode(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return the payload of a float32 tensor."""
        ...

    def decode(self, payload: tf.Tensor) -> tf.Tensor:
        """Return the float32 tensor, in its first shape, that a payload stands for."""
        ...
