"""Whole models: from stored pixels to logits for training, and to probabilities for serving."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from models.layers.augmentation import AugmentedModel
from models.layers.backend import require_tensorflow
from models.layers.drop import SeededDrop
from models.layers.normalisation import plain_layers
from models.layers.preprocessing import InputGroup, preprocess
from models.layers.resolution import TrainingResolution, accept_any_size
from models.networks.table import NETWORKS

POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
"""Keras's dtype policy for each precision of training."""
_PROBABILITIES = {"multi_label": "sigmoid", "single_label": "softmax"}


def build_model(
    groups: Sequence[InputGroup],
    *,
    network: str,
    classes: int,
    upsampling: str,
    augmentation: keras.layers.Layer | None,
    precision: str = "float32",
    resizes: bool = False,
    **settings: Any,
) -> keras.Model:
    """Build the whole model, from stored pixels to logits.

    Input: a dict, for each group name images `(batch, height, width, bands)` of the group's dtype.
    Output: float32 logits `(batch, classes)`.

    Args:
        groups: The image groups from which the network sees bands.
        network: Name in the table of networks.
        classes: Number of logits.
        upsampling: The same as in `preprocess`.
        precision: Number format of the network, "float32", "bfloat16" or "float16"; its variables and the layers before
            it are always float32.
        augmentation: A layer of the table of augmentations; None: no augmentation. With augmentation, or with dropout
            or stochastic depth in the network, the result is an `AugmentedModel`, which in training takes `seeds` too.
        resizes: Whether training may pass smaller images to the network, with `models.layers.resolution.training_size`.
        **settings: The network's own settings.

    Raises:
        ValueError: an unknown network; augmentation, dropout or stochastic depth, which require
            TensorFlow, on another backend of Keras. Or an error of `preprocess`, the network or the augmentation.
    """
    if network not in NETWORKS:
        raise ValueError(f"network must be one of {tuple(NETWORKS)}, got {network!r}")
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in groups}
    images = preprocess(inputs, groups, upsampling=upsampling)
    if resizes:
        images = TrainingResolution(name="training_resolution")(images)
    logits = NETWORKS[network](images, classes=classes, dtype=POLICIES[precision], **settings)
    model = keras.Model(inputs, logits, name=network)
    if resizes:
        accept_any_size(model)
    if augmentation is None and not any(isinstance(layer, SeededDrop) for layer in model.layers):
        return model
    require_tensorflow("a model with augmentation, dropout or stochastic depth")
    return AugmentedModel(model, augmentation, name=f"augmented_{network}")


def inputs_of(model: keras.Model, images: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image groups that are inputs of a model: a dataset may have more groups.

    Keras pairs groups and inputs by their order, so that one more group would shift all later ones.
    """
    return {name: images[name] for name in model.input}


def with_probabilities(model: keras.Model, task: str) -> keras.Model:
    """Return a copy of a model of logits for serving: image groups in, output layer "probabilities".

    The copy has equal weights, computes in float32 and has no augmentation. Its last layer is a sigmoid per class for
    "multi_label", and a softmax over the classes for "single_label".

    Raises:
        ValueError: an unknown task.
    """
    if task not in _PROBABILITIES:
        raise ValueError(f"task must be one of {sorted(_PROBABILITIES)}, got {task!r}")
    model = plain_layers(model.network if isinstance(model, AugmentedModel) else model)
    activation = keras.layers.Activation(_PROBABILITIES[task], dtype="float32", name="probabilities")
    return keras.Model(model.input, activation(model.output), name=f"{model.name}_probabilities")
