"""The settings of the network."""

from typing import Literal

from pydantic import Field

from conf.section import Section


class ModelConfig(Section):
    """ResNet v1.5 on all bands."""

    depth: Literal[18, 34, 50, 101, 152]
    """Number of layers with weights."""
    width_factor: float = Field(gt=0, le=4)
    """Scales every channel count; 1.0 is the published network."""
    upsampling: Literal["nearest", "bilinear", "bicubic"]
    """How coarser image groups reach the finest one's resolution."""
    augmentation: Literal["none", "flips", "dihedral"]
    """Training images are flipped, or flipped and turned by quarters (squares only); drawn anew every epoch."""
