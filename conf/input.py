"""How images reach the network, whichever network it is."""

from typing import Literal

from pydantic import Field, field_validator

from conf.augmentations import AugmentationConfig, NoAugmentationConfig
from conf.section import Section


class InputConfig(Section):
    """The layers before the network, which are part of the logged model; only augmentation is not."""

    bands: list[str] | None = Field(default=None, min_length=1)
    """Names of the dataset's bands that the network sees, in this order; null: all, in the dataset's order. The logged
    model takes whole image groups, but not those of which no band is named."""
    upsampling: Literal["nearest", "bilinear", "bicubic"] = "nearest"
    """How coarser image groups reach the finest one's resolution."""
    augmentation: AugmentationConfig = NoAugmentationConfig()
    """What is done to training images, drawn anew every epoch."""

    @field_validator("bands")
    @classmethod
    def _bands_are_named_once(cls, bands: list[str] | None) -> list[str] | None:
        twice = [name for name in bands or [] if (bands or []).count(name) > 1]
        if twice:
            raise ValueError(f"input.bands names {twice[0]} more than once: name each band once")
        return bands
