"""Weights of an earlier training as the start of a new one: by name and shape, bands by name, the head by classes."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from models.networks import whitening

_BANDS_AXIS = -2  # axis of a kernel: (height, width, channels in, channels out) or (in, out)


@dataclass(frozen=True)
class TrainedWeights:
    """The weights of an earlier training."""

    arrays: Mapping[str, NDArray[Any]]
    """Values by the path of their variable, `stem_conv/kernel`, with dots for slashes."""
    bands: Sequence[str] | None
    """Names of the input channels; None: unknown."""
    class_names: Sequence[str] | None
    """Names of the logits; None: unknown."""


@dataclass
class Taken:
    """The origin of the value of each variable of the new model."""

    whole: list[str] = field(default_factory=list)
    """Variables with the value of the earlier training."""
    by_band: list[str] = field(default_factory=list)
    """Variables that took some or all input channels from the same bands of the earlier training."""
    new: dict[str, str] = field(default_factory=dict)
    """Variables that start with new weights, each with the reason."""
    unused: list[str] = field(default_factory=list)
    """Values of the earlier training that no variable has."""

    def lines(self) -> list[str]:
        """Return the facts as lines of text."""
        lines = [
            f"{len(self.whole) + len(self.by_band)} variables start with the weights of the earlier training",
            *(f"{name}: input channels are taken by the names of their bands" for name in self.by_band),
            *(f"{name} starts from random weights: {reason}" for name, reason in self.new.items()),
        ]
        if self.unused:
            lines.append(f"{len(self.unused)} values of the earlier training are not used, such as {self.unused[0]}")
        return lines


def take_weights(
    model: keras.Model, earlier: TrainedWeights, *, bands: Sequence[str], class_names: Sequence[str]
) -> Taken:
    """Set the variables of a model to the values of an earlier training, where name and shape agree.

    The first kernel has the bands as input channels. It takes the channel of the same band, and keeps its new weights
    for bands that the earlier network did not see. If the bands of either network are unknown, the whole kernel is
    taken. The head keeps new weights unless the classes are the same in the same order. The head is the last layer with
    a kernel that has an output for each class.

    Args:
        model: The new model; its other variables keep their values.
        earlier: The weights of the earlier training.
        bands: Names of the new network's input channels.
        class_names: Names of the new network's logits.

    Raises:
        ValueError: No variable of the model has a value of the same name and shape.
    """
    taken, left = Taken(), dict(earlier.arrays)
    others = earlier.class_names is not None and list(earlier.class_names) != list(class_names)
    head = _head_variables(model, len(class_names)) if others else ()
    first = _first_kernel(model, len(bands))
    for variable in model.variables:
        name = name_of(variable)
        value = left.pop(name, None)
        if value is None:
            taken.new[name] = "the earlier training has no such variable"
        elif any(variable is each for each in head):
            taken.new[name] = "the classes are others"
        elif variable is first and earlier.bands is not None and _of_other_bands(value, variable, earlier.bands, bands):
            known = [(earlier.bands.index(band), place) for place, band in enumerate(bands) if band in earlier.bands]
            if not known:
                taken.new[name] = "the earlier network saw none of these bands"
            elif name.split(".")[-2] == whitening.LAYER and len(known) < len(bands):
                taken.new[name] = "the earlier network did not see all of these bands, whose filters belong together"
            else:
                start = np.array(variable)
                start[..., [place for _, place in known], :] = value[..., [place for place, _ in known], :]
                variable.assign(start)
                taken.by_band.append(name)
        elif tuple(value.shape) != tuple(variable.shape):
            taken.new[name] = f"its shape is {tuple(variable.shape)}, that of the earlier training {tuple(value.shape)}"
        else:
            variable.assign(value)
            taken.whole.append(name)
    taken.unused = sorted(left)
    if not taken.whole and not taken.by_band:
        raise ValueError(
            f"no variable of the network has a value of the same name and shape; the network has {name_of(first)}, the "
            f"earlier training {next(iter(sorted(earlier.arrays)), 'nothing')}"
        )
    return taken


def _head_variables(model: keras.Model, classes: int) -> Sequence[keras.Variable]:
    # Keras lists nested layers in reverse; variables are in the order of their layers.
    layers = {
        id(kernel): layer for layer in model._flatten_layers() if (kernel := getattr(layer, "kernel", None)) is not None
    }
    fitting = [each for each in model.variables if id(each) in layers and each.shape[-1] == classes]
    return layers[id(fitting[-1])].variables if fitting else ()


def freeze(model: keras.Model, patterns: Sequence[str]) -> list[str]:
    """Freeze the weights of layers: they have no gradient, and batch norm uses its moving statistics.

    Args:
        model: The model.
        patterns: Names of layers with `*` and `?`, such as `stem_*`.

    Returns:
        Names of the frozen layers that have variables.

    Raises:
        ValueError: No layer with variables has such a name, or no variable is left to train.
    """
    layers = [layer for layer in model._flatten_layers() if layer.variables and not _has_inner_layers(layer)]
    frozen = []
    for pattern in patterns:
        found = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if not found:
            raise ValueError(f"no layer with weights is called {pattern!r}; {_examples(layers)}")
        for layer in found:
            layer.trainable = False
            frozen.append(layer.name)
    if not model.trainable_variables:
        raise ValueError(f"{', '.join(patterns)} freeze every layer: nothing is left to train")
    return sorted(set(frozen))


def rate_factors(model: keras.Model, factors: Mapping[str, float]) -> list[tuple[keras.Variable, float]]:
    """Return the trainable variables whose learning rate has a factor other than 1, each with its factor.

    Args:
        model: The model, with its frozen layers.
        factors: Factors by names with `*` and `?`, of layers ("stage*") or of their variables ("stage*/beta"); if
            several names fit a variable, the last one counts.

    Raises:
        ValueError: No layer with trainable variables, or no variable in such a layer, has this name.
    """
    layers = [layer for layer in model._flatten_layers() if layer.trainable_variables and not _has_inner_layers(layer)]
    chosen: dict[int, tuple[keras.Variable, float]] = {}
    for pattern, factor in factors.items():
        of_layer, _, of_variable = pattern.partition("/")
        found = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, of_layer)]
        if not found:
            raise ValueError(f"no layer with weights to train is called {of_layer!r}; {_examples(layers)}")
        variables = [variable for layer in found for variable in layer.trainable_variables]
        fitting = [variable for variable in variables if fnmatch.fnmatchcase(variable.name, of_variable or "*")]
        if not fitting:
            names = ", ".join(sorted({variable.name for variable in variables}))
            raise ValueError(f"no variable of layers {of_layer!r} is called {of_variable!r}; they have {names}")
        chosen |= {id(variable): (variable, factor) for variable in fitting}
    return [(variable, factor) for variable, factor in chosen.values() if factor != 1]


def name_of(variable: keras.Variable) -> str:
    """Return the path of a variable with dots for slashes, as in checkpoints."""
    return str(variable.path).replace("/", ".")


def _first_kernel(model: keras.Model, bands: int) -> keras.Variable:
    """Return the first variable, frozen or not, with as many input channels as bands; else the first variable."""
    kernels = [v for v in model.variables if len(v.shape) >= 2 and v.shape[_BANDS_AXIS] == bands]
    return (kernels or model.variables)[0]


def _of_other_bands(
    value: NDArray[Any], variable: keras.Variable, earlier: Sequence[str], bands: Sequence[str]
) -> bool:
    """Return whether a value is the same kernel over the earlier training's bands, and these are others."""
    shape = (*variable.shape[:_BANDS_AXIS], len(earlier), variable.shape[-1])
    return list(earlier) != list(bands) and tuple(value.shape) == shape


def _has_inner_layers(layer: keras.layers.Layer) -> bool:
    return len(list(layer._flatten_layers())) > 1


def _examples(layers: Sequence[keras.layers.Layer]) -> str:
    names = list(dict.fromkeys(layer.name for layer in layers))
    return f"names are {', '.join(names[:3])} to {names[-1]}" if len(names) > 4 else f"names are {', '.join(names)}"
