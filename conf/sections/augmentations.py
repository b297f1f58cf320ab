"""The settings of every augmentation of training images, by name; their defaults are stated here only."""

from typing import Annotated, Literal

from pydantic import Field

from conf.sections.imports import Imported
from conf.sections.section import Member, member_names


class AugmentationBase(Member):
    """What all augmentations share: they are drawn anew for every sample and epoch."""

    @property
    def turns(self) -> bool:
        """Whether images are turned by quarters, which needs squares."""
        return False


class NoAugmentationConfig(AugmentationBase):
    """Training images stay as they are."""

    name: Literal["none"] = "none"


class FlipsConfig(AugmentationBase):
    """Images are mirrored left and right, top and bottom, each half of the time."""

    name: Literal["flips"] = "flips"


class DihedralConfig(AugmentationBase):
    """Images are flipped and turned by quarters; squares only."""

    name: Literal["dihedral"] = "dihedral"

    @property
    def turns(self) -> bool:
        """Whether images are turned by quarters, which needs squares."""
        return True


class PadCropConfig(AugmentationBase):
    """Images are padded and cropped to their size at a random place, and mirrored; a square of them may be cut out."""

    name: Literal["pad_crop"] = "pad_crop"
    padding: int = Field(default=4, gt=0, le=1024)
    """Pixels of the finest image group on each side; a multiple of what one pixel of every coarser group covers."""
    fill: Literal["reflect", "zero"] = "reflect"
    """Pixels of the padding: the image mirrored at its border, or stored values of 0."""
    mirror: bool = True
    """Whether half of the crops are mirrored left and right."""
    cutout: int = Field(default=0, ge=0, le=1024)
    """Side of a square, at a random place inside the crop, that is filled with the crop's mean; 0: none. In pixels of
    the finest image group; a multiple of what one pixel of every coarser group covers."""


class ImportedAugmentationConfig(Imported, AugmentationBase):
    """Any function of yours from images and seeds to images."""

    name: Literal["import"] = "import"


AugmentationConfig = Annotated[
    NoAugmentationConfig | FlipsConfig | DihedralConfig | PadCropConfig | ImportedAugmentationConfig,
    Field(discriminator="name"),
]

AUGMENTATION_NAMES = member_names(AugmentationConfig)
