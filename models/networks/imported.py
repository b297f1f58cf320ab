"""A network from outside this project, by import path."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras

from models.imported import errors_of_function, import_function

_SETTING = "model.path"
_OF_KERAS_APPLICATIONS = {"weights": None, "classifier_activation": None, "include_preprocessing": False}
"""Arguments for a function that returns a model, if it has them and the settings do not name them."""


def imported(
    images: keras.KerasTensor, *, classes: int, path: str, settings: Mapping[str, Any], dtype: str | None
) -> keras.KerasTensor:
    """Map images `(batch, height, width, bands)` to float32 logits `(batch, classes)` with an imported function.

    A function with an argument `input_shape` returns a model, as the functions of `keras.applications` do:

        function(input_shape=(height, width, bands), classes=classes, **settings) -> keras.Model of images

    If the function has the arguments `weights` and `classifier_activation`, they are None: weights are drawn, and
    outputs are logits. `include_preprocessing` is False: the preprocessing of Keras's networks is for pixels from 0 to
    255.

    Every other function continues the graph of layers:

        function(images, classes=classes, dtype=dtype, **settings) -> logits

    During the call, Keras's global dtype policy is `dtype`. Layers that draw random numbers keep Keras's own state, and
    checkpoints contain it. The logged model consists of the network's own layers: whoever loads it needs their modules.

    Args:
        images: Normalised images.
        classes: Number of logits.
        path: Import path of the function, `package.module:function`.
        settings: Further arguments of the function.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; None: Keras's global one.

    Raises:
        ValueError: The function is not found, raises an exception, or returns something else. The message is one line.
    """
    function = import_function(path, _SETTING)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype or before)
    try:
        with errors_of_function(f"{_SETTING}={path}"):
            logits = _called(function, images, classes, dtype, settings)
    finally:
        keras.config.set_dtype_policy(before)
    if not isinstance(logits, keras.KerasTensor) or tuple(logits.shape) != (None, classes):
        found = f"{tuple(logits.shape)}" if isinstance(logits, keras.KerasTensor) else f"a {type(logits).__name__}"
        raise ValueError(
            f"{_SETTING}={path}: the network returns {found}, expected logits of shape (None, {classes}), one per class"
        )
    return logits if logits.dtype == "float32" else keras.ops.cast(logits, "float32")


def _called(
    function: Callable[..., Any],
    images: keras.KerasTensor,
    classes: int,
    dtype: str | None,
    settings: Mapping[str, Any],
) -> Any:
    arguments = inspect.signature(function).parameters
    if "input_shape" not in arguments:
        return function(images, classes=classes, dtype=dtype, **settings)
    if settings.get("classifier_activation") is not None:
        raise ValueError(f"classifier_activation={settings['classifier_activation']} gives no logits: leave it out")
    defaults = {name: value for name, value in _OF_KERAS_APPLICATIONS.items() if name in arguments}
    model = function(input_shape=tuple(images.shape[1:]), classes=classes, **{**defaults, **settings})
    if not isinstance(model, keras.Model):
        raise TypeError(f"a function with an argument input_shape returns a keras.Model, got a {type(model).__name__}")
    return model(images)
