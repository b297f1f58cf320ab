"""The features of a classifier: the input of its classification head."""

from collections.abc import Callable
from typing import Any

import keras


def features_and_outputs(model: keras.Model, classes: int) -> Callable[[Any], Any]:
    """Return a function that returns a model's features and its outputs side by side.

    The head is the last called dense layer, or 1 x 1 convolution, with one unit per class. The features are its input:
    in a residual network, the mean of the last convolutions. The head may lie within a nested model, as in networks of
    `keras.applications`. Therefore its input is recorded during the call, not taken from the graph.

    Args:
        model: A model of image groups; only the calls of its dense layers are changed.
        classes: Number of the model's outputs.

    Returns:
        Function from image groups to float32 `(batch, features + classes)`.

    Raises:
        ValueError: The model has no such layer. When called: the input of the head is neither `(batch, features)` nor
            one pixel.
    """
    heads = [layer for layer in model._flatten_layers() if _is_head(layer, classes)]
    if not heads:
        raise ValueError(f"the model {model.name} has no dense layer with {classes} units, one for each class")
    taken: list[Any] = []
    for head in heads:
        head.call = _taking(head.call, taken)

    def both(images: Any) -> Any:
        taken.clear()
        outputs = model(images, training=False)
        features = taken[-1]
        if len(features.shape) == 4 and tuple(features.shape[1:3]) == (1, 1):
            features = features[:, 0, 0]
        if len(features.shape) != 2:
            raise ValueError(
                f"the head of the model {model.name} takes an input of shape {tuple(features.shape)}, expected "
                "(batch, features)"
            )
        return keras.ops.concatenate([keras.ops.cast(each, "float32") for each in (features, outputs)], axis=1)

    return both


def _is_head(layer: Any, classes: int) -> bool:
    if isinstance(layer, keras.layers.Conv2D):
        return layer.data_format == "channels_last" and layer.filters == classes and tuple(layer.kernel_size) == (1, 1)
    return isinstance(layer, keras.layers.Dense) and layer.units == classes


def _taking(call: Callable[..., Any], taken: list[Any]) -> Callable[..., Any]:
    """Return a call of a layer that records its input."""

    def remembered(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        taken.append(inputs)
        return call(inputs, *args, **kwargs)

    return remembered
