"""How images reach the network, whichever network it is."""

import itertools
from typing import Literal

from pydantic import Field, field_validator

from conf.sections.augmentations import AugmentationConfig, NoAugmentationConfig
from conf.sections.schedules import Boundary
from conf.sections.section import Section


class ResolutionPart(Section):
    """Epochs in which the network is trained on smaller images."""

    until: Boundary
    """Place of the run where they end, written as in `schedule`. The size changes between two epochs: an epoch that has
    begun before this place is trained to its end."""
    scale: float = Field(gt=0, lt=1)
    """Height and width of the images, as part of the full ones; a whole number of pixels."""


class InputConfig(Section):
    """The layers before the network, which are part of the logged model; augmentation and smaller images are not."""

    bands: list[str] | None = Field(default=None, min_length=1)
    """Names of the dataset's bands that the network sees, in this order; null: all, in the dataset's order. The logged
    model takes whole image groups, but not those of which no band is named."""
    upsampling: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """How coarser image groups reach the finest one's resolution."""
    augmentation: AugmentationConfig = NoAugmentationConfig()
    """What is done to training images, drawn anew every epoch."""
    resolution_schedule: list[ResolutionPart] = Field(default=[])
    """Training at growing resolution, such as [{until: {fraction: 0.4}, scale: 0.5}]: smaller images first, which take
    less time, then the full ones. Validation and the logged model have full images always. Empty: so has training."""

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
        """Every place of the run by its key, in the order in which they must come."""
        return [
            (f"input.resolution_schedule[{number}].until", part.until)
            for number, part in enumerate(self.resolution_schedule)
        ]
