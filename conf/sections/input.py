"""The settings of the images that reach the network, for every network."""

import itertools
from typing import Literal

from pydantic import Field, field_validator

from conf.sections.augmentations import AugmentationConfig, NoAugmentationConfig
from conf.sections.schedules import Boundary
from conf.sections.section import Section


class ResolutionPart(Section):
    """A period of epochs that trains the network on smaller images."""

    until: Boundary
    """Place of the run where these epochs end, written as in `schedule`. The size changes between two epochs: an epoch
    that starts before this place is trained to its end."""
    scale: float = Field(gt=0, lt=1)
    """Height and width of the images, as a fraction of the full ones; the result must be whole pixels."""


class InputConfig(Section):
    """The layers before the network, which belong to the logged model; augmentation and smaller images do not."""

    bands: list[str] | None = Field(default=None, min_length=1)
    """Names of the dataset's bands that the network sees, in this order; null: all, in the dataset's order. The logged
    model takes whole image groups. It does not take groups without a named band."""
    upsampling: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """Interpolation that brings coarser image groups to the finest resolution."""
    augmentation: AugmentationConfig = NoAugmentationConfig()
    """Augmentation of the training images; its random numbers are drawn every epoch."""
    resolution_schedule: list[ResolutionPart] = Field(default=[])
    """Training at growing resolution, such as [{until: {fraction: 0.4}, scale: 0.5}]: first smaller images, which take
    less time, then full ones. Validation and the logged model always use full images. Empty: training does too."""

    @field_validator("bands")
    @classmethod
    def _bands_are_named_once(cls, bands: list[str] | None) -> list[str] | None:
        twice = [name for name in bands or [] if (bands or []).count(name) > 1]
        if twice:
            raise ValueError(f"input.bands names {twice[0]} more than once: name each band once")
        return bands

    @field_validator("resolution_schedule")
    @classmethod
    def _images_grow(cls, parts: list[ResolutionPart]) -> list[ResolutionPart]:
        for number, (before, part) in enumerate(itertools.pairwise(parts), start=1):
            if part.scale <= before.scale:
                raise ValueError(
                    f"input.resolution_schedule[{number}]: scale={part.scale:g} is not above {before.scale:g}, that of "
                    "the part before it: images must grow"
                )
        return parts

    def places(self) -> list[tuple[str, Boundary]]:
        """Return every place of the run by its key, in the required order."""
        return [
            (f"input.resolution_schedule[{number}].until", part.until)
            for number, part in enumerate(self.resolution_schedule)
        ]
