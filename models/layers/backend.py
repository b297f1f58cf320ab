"""Keras's backend: networks, losses and optimizers work with any backend, some layers only with TensorFlow."""

import keras

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
"""Whether the backend is TensorFlow; otherwise these layers do not import it, and it need not be installed."""


def require_tensorflow(what: str) -> None:
    """Refuse another backend than TensorFlow.

    Raises:
        ValueError: Keras has another backend; the message has its name and `what`.
    """
    if not ON_TENSORFLOW:
        raise ValueError(
            f"{what} computes by operations of TensorFlow, and Keras's backend is {keras.backend.backend()}: do "
            "without it, or set KERAS_BACKEND=tensorflow"
        )
