"""The image size in each epoch of training; this module imports no TensorFlow because the driver uses it too."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from conf.schema import RunConfig
from conf.sections.input import InputConfig
from conf.sections.networks import ModelConfig
from models.layers.grids import Size
from pipelines.dataset.format.manifest import Manifest
from pipelines.sample import ImageGroup
from pipelines.training.setup.bands import used_groups
from pipelines.training.setup.rates import place_steps

_KEY = "input.resolution_schedule"
_TOLERANCE = 0.01
"""The tolerance in pixels for a scale such as 0.3333 that does not give a whole number of pixels."""


@dataclass(frozen=True)
class ScaledEpochs:
    """A range of consecutive epochs with one image size."""

    first: int
    """Index of the first epoch, from 0."""
    end: int
    """Index of the first epoch after the range."""
    scale: float
    """Height and width as a fraction of those of the full images."""


def scaled_epochs(
    config: InputConfig, recipe_epochs: float | None, epochs: int, steps_per_epoch: int
) -> list[ScaledEpochs]:
    """Return the epochs of each part of `input.resolution_schedule`, and last those with full images; [] without it.

    The size changes only between epochs, so an epoch has one rate and one loss. The training step is then compiled
    again in the first step of an epoch, which no rate includes. An epoch has the size that is valid at its first step.

    Args:
        config: The section with the schedule.
        recipe_epochs: `schedule.recipe_epochs`.
        epochs: Number of epochs of the run.
        steps_per_epoch: Number of optimizer steps per epoch.

    Raises:
        ValueError: A boundary is beyond the end of the run or before its predecessor. Or a part has no epoch, or no
            epoch is left for the full images.
    """
    parts = config.resolution_schedule
    found: list[ScaledEpochs] = []
    first = 0
    for number, (_, step) in enumerate(place_steps(config.places(), recipe_epochs, epochs, steps_per_epoch)):
        end = math.ceil(step / steps_per_epoch)
        if end == first:
            raise ValueError(
                f"{_KEY}[{number}] has no effect: none of the {epochs} epochs begins within it, and images change "
                "their size between epochs; raise its until, leave it out, or train longer"
            )
        if end >= epochs:
            raise ValueError(
                f"{_KEY}[{number}].until is after the beginning of the last of {epochs} epochs, so that none has the "
                "full images, which validation and the logged model have: lower it, or train longer"
            )
        found.append(ScaledEpochs(first, end, parts[number].scale))
        first = end
    return [*found, ScaledEpochs(first, epochs, 1.0)] if parts else []


def full_size(groups: Sequence[ImageGroup]) -> Size:
    """Return the size of the network's images in validation, which is the size of the finest image group.

    Args:
        groups: The groups that the network sees, see `used_groups`.
    """
    return max(group.shape[0] for group in groups), max(group.shape[1] for group in groups)


def part_sizes(config: InputConfig, model: ModelConfig, manifest: Manifest) -> list[Size]:
    """Return the image size in each part of `input.resolution_schedule`, the full size last; [] without it.

    Args:
        config: The section with the schedule.
        model: The model's section.
        manifest: Manifest of the dataset.

    Raises:
        ValueError: A scale gives no whole number of pixels, fewer pixels than the network needs, or the same size as
            the next part.
    """
    parts, full = config.resolution_schedule, full_size(used_groups(manifest.groups, config.bands))
    sizes = [_scaled(full, part.scale, f"{_KEY}[{number}]") for number, part in enumerate(parts)]
    needed = model.shortest_side
    for number, (size, following) in enumerate(itertools.pairwise([*sizes, full])):
        where = f"{_KEY}[{number}]: scale={parts[number].scale:g} of {_pixels(full)} is {_pixels(size)}"
        if size == following:
            raise ValueError(f"{where}, as in the part after it: leave one of them out")
        if min(size) < needed:
            raise ValueError(
                f"{where}, and model.name={model.name} needs at least {needed} on each side: raise the scale"
            )
    return [*sizes, full] if parts else []


def trained_sizes(config: RunConfig, manifest: Manifest, steps_per_epoch: int) -> list[Size | None]:
    """Return the image size in each epoch; None for all epochs without `input.resolution_schedule`.

    Raises:
        ValueError: See `scaled_epochs` and `part_sizes`.
    """
    epochs = config.training.epochs
    if not config.input.resolution_schedule:
        return [None] * epochs
    sizes = part_sizes(config.input, config.model, manifest)
    scaled = scaled_epochs(config.input, config.schedule.recipe_epochs, epochs, steps_per_epoch)
    return [size for size, part in zip(sizes, scaled, strict=True) for _ in range(part.first, part.end)]


def described_sizes(sizes: Sequence[Size | None]) -> str:
    """Return a text with the size by epoch: `16 x 16 pixels in epochs 1 to 4, 32 x 32 pixels in epoch 5`."""
    texts, first = [], 1
    for size, group in itertools.groupby(sizes):
        last = first + len(list(group)) - 1
        if size is not None:
            texts.append(f"{_pixels(size)} in {f'epochs {first} to {last}' if last > first else f'epoch {first}'}")
        first = last + 1
    return ", ".join(texts)


def _scaled(full: Size, scale: float, key: str) -> Size:
    # Both sides are whole numbers of pixels if the scale is a multiple of 1 / (greatest common divisor of the sides).
    unit = math.gcd(*full)
    count = round(scale * unit)
    if abs(scale - count / unit) * max(full) > _TOLERANCE:
        possible = [max(1, math.floor(scale * unit)), math.ceil(scale * unit)]
        choices = " or ".join(f"{each / unit:g}" for each in sorted({*possible}) if each < unit)
        raise ValueError(
            f"{key}: scale={scale:g} of {_pixels(full)} is {full[0] * scale:g} x {full[1] * scale:g}, no whole number"
            + (f": choose {choices}" if choices else "")
        )
    return full[0] // unit * count, full[1] // unit * count


def _pixels(size: Size) -> str:
    return f"{size[0]} x {size[1]} pixels"
