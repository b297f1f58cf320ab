"""Keras's backend: networks, losses and optimizers compute under any, some layers by operations of TensorFlow alone."""

import keras

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
"""Whether TensorFlow computes; on another backend these layers do not import it, and it need not be installed."""


def require_tensorflow(what: str) -> None:
    """Refuse what no other backend can compute.

    Raises:
        ValueError: Keras has another backend; names it and `what`.
    """
    if not ON_TENSORFLOW:
        raise ValueError(
            f"{what} computes by operations of TensorFlow, and Keras's backend is {keras.backend.backend()}: do "
            "without it, or set KERAS_BACKEND=tensorflow"
        )
