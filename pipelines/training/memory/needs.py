"""The estimate of a rank's memory needs, from the shapes of its variables and of all layers' outputs."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from models.layers.augmentation import AugmentedModel
from pipelines.dataset.format.manifest import Manifest
from pipelines.training.memory.memory import Needs
from pipelines.training.step.mode import Mode

_FLOAT_BYTES = 4


def estimate(
    model: keras.Model,
    mode: Mode,
    manifest: Manifest,
    *,
    accumulates: bool,
) -> Needs:
    """Estimate the memory needs of a rank; an image side that a network does not fix counts as 1.

    Args:
        model: The model that is trained.
        mode: Its training mode, with optimizer and exchange.
        manifest: Manifest of the dataset; a batch has its image groups.
        accumulates: Whether gradients are summed over micro-batches, which needs their memory twice.
    """
    gradients = _FLOAT_BYTES * sum(math.prod(variable.shape) for variable in model.trainable_variables)
    images = sum(math.prod(group.shape) * np.dtype(group.dtype).itemsize for group in manifest.groups)
    network = model.network if isinstance(model, AugmentedModel) else model
    outputs = sum(math.prod(side or 1 for side in each.shape[1:]) * _size_of(each.dtype) for each in _outputs(network))
    return Needs(
        weights=_bytes(model.variables),
        gradients=gradients * (2 if accumulates else 1),
        optimizer=_bytes(mode.optimizer.variables),
        exchange=_bytes([entry.variable for entry in mode.exchange.state]),
        sample=images + outputs,
        mode=_bytes(_kept(mode)),
    )


def _kept(mode: Mode) -> list[Any]:
    """Return the variables of a mode except the optimizer's, which differ between ranks in some modes."""
    counted = {id(variable) for variable in mode.optimizer.variables}
    return [each for each in (*mode.shared, *mode.own, *mode.between) if id(each) not in counted]


def _outputs(network: Any) -> Iterator[Any]:
    """Yield the outputs of all operations of a functional model, including nested ones."""
    for operation in getattr(network, "operations", network.layers):
        if hasattr(operation, "operations"):
            yield from _outputs(operation)
            continue
        # A layer has no single output if its model is not functional or if it is used twice.
        with suppress(AttributeError, ValueError):
            yield from keras.tree.flatten(operation.output)


def _bytes(variables: Any) -> int:
    return sum(math.prod(variable.shape) * _size_of(variable.dtype) for variable in variables)


def _size_of(dtype: Any) -> int:
    return int(tf.as_dtype(dtype).size)
