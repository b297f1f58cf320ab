"""The settings of every network, by name; their defaults are stated here only."""

from typing import Literal

from pydantic import Field

from conf.section import Member, member_names


class ResNetConfig(Member):
    """ResNet v1.5 (He et al. 2015, Goyal et al. 2017)."""

    name: Literal["resnet"] = "resnet"
    depth: Literal[18, 34, 50, 101, 152] = 50
    """Number of layers with weights."""
    width_factor: float = Field(default=1.0, gt=0, le=4)
    """Scales every channel count; 1.0 is the published network."""


# From the second network on: Annotated[ResNetConfig | ..., Field(discriminator="name")].
ModelConfig = ResNetConfig

MODEL_NAMES = member_names(ModelConfig)
