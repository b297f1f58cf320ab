"""The settings of every augmentation of training images, by name; their defaults are stated here only."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from conf.sections.section import Imported, NamedSection


class AugmentationBase(NamedSection):
    """The settings that all augmentations share. Random numbers are drawn per sample and epoch."""

    turns: ClassVar[bool] = False
    """Whether images are rotated by quarter turns, which requires square images."""


class NoAugmentationConfig(AugmentationBase):
    """Training images are not changed."""

    name: Literal["none"] = "none"


class FlipsConfig(AugmentationBase):
    """Images are mirrored left to right and top to bottom, each with probability 1/2."""

    name: Literal["flips"] = "flips"


class DihedralConfig(AugmentationBase):
    """Images are mirrored and rotated by quarter turns; square images only."""

    turns: ClassVar[bool] = True
    name: Literal["dihedral"] = "dihedral"


class PadCropConfig(AugmentationBase):
    """Images are padded, cropped to their size at a random place, and mirrored; a square may be cut out."""

    name: Literal["pad_crop"] = "pad_crop"
    padding: int = Field(default=4, gt=0, le=1024)
    """Pixels of the finest image group on each side; a multiple of the pixels that one pixel of every coarser group
    covers."""
    fill: Literal["reflect", "zero"] = "reflect"
    """Pixels of the padding: the image mirrored at its border, or stored values of 0."""
    mirror: bool = True
    """Whether half of the crops are mirrored left and right."""
    cutout: int = Field(default=0, ge=0, le=1024)
    """Side, in pixels of the finest image group, of a square at a random place inside the crop that is filled with the
    crop's mean. It is a multiple of the pixels that one pixel of every coarser group covers; 0: no square."""


class ImportedAugmentationConfig(Imported, AugmentationBase):
    """Your own function from images and seeds to images."""


AugmentationConfig = Annotated[
    NoAugmentationConfig | FlipsConfig | DihedralConfig | PadCropConfig | ImportedAugmentationConfig,
    Field(discriminator="name"),
]
