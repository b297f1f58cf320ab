"""The settings of every codec, by name; the defaults are those of `models.compression`."""

from typing import Annotated, Literal

from pydantic import Field

from conf.section import Section


class NoneConfig(Section):
    """Float32, 4 bytes an element."""

    name: Literal["none"]


class Fp16Config(Section):
    """Half floats."""

    name: Literal["fp16"]
    prescale: float = Field(default=1.0, gt=0)
    """Multiplies before the rounding and is divided out after it: shifts the window from 6e-8 to 65504."""
    sum_in_float32: bool = False
    """Send halves as bytes and sum them in float32: faster on CPUs, one more rounding."""


class Bf16Config(Section):
    """Brain floats, summed in float32."""

    name: Literal["bf16"]
    prescale: float = Field(default=1.0, gt=0)
    error_feedback: bool = False
    """Add what the rounding lost to the next gradient."""


class OneBitConfig(Section):
    """One bit an element, two means a column (Seide et al. 2014)."""

    name: Literal["onebit"]
    error_feedback: bool = True
    """Off for comparison only."""


class ScaledSignConfig(Section):
    """One bit an element, one scale a tensor (Karimireddy et al. 2019)."""

    name: Literal["scaled_sign"]
    error_feedback: bool = True
    """Off for comparison only."""


class QSGDConfig(Section):
    """Random rounding to a few levels (Alistarh et al. 2017)."""

    name: Literal["qsgd"]
    bits: int = Field(default=4, ge=2, le=8)
    """Of an element: 2**(bits - 1) - 1 levels on each side of 0."""
    bucket_size: int = Field(default=512, ge=8, multiple_of=8)
    """Elements that share a norm."""
    norm: Literal["l2", "max"] = "max"
    """The theorem's, or the one with the smaller error in large buckets."""
    error_feedback: bool = False


class NormSparsifierConfig(Section):
    """Elements survive in proportion to their magnitude (QSGD with one level, as a list)."""

    name: Literal["norm_sparsifier"]


class ThresholdConfig(Section):
    """Plus or minus tau for what grew beyond it (Strom 2015)."""

    name: Literal["threshold"]
    tau: float = Field(gt=0)
    """In units of the gradient; near the magnitude of large ones."""


class DensityStage(Section):
    """For the first steps of a run."""

    before_step: int = Field(gt=0)
    density: float = Field(gt=0, le=1)


class RankStage(Section):
    """For the first steps of a run."""

    before_step: int = Field(gt=0)
    rank: int = Field(ge=1)


class SparseConfig(Section):
    """Codecs that send a part of the elements."""

    density: float = Field(default=0.01, gt=0, le=1)
    """Part of the elements that is sent at a step."""
    stages: list[DensityStage] = Field(default=[])
    """Other densities for the first steps, bounds rising."""


class AdaptiveConfig(SparseConfig):
    """The largest positive and negative elements, each sent as its mean (Dryden et al. 2016)."""

    name: Literal["adaptive"]


class LargestConfig(SparseConfig):
    """Codecs that send the largest elements."""

    owner_factor: float = Field(default=2.0, ge=1)
    """Ranks that sum a part for all pass on so many times as many elements as each rank sends."""


class TopKConfig(LargestConfig):
    """The largest elements (Aji and Heafield 2017)."""

    name: Literal["topk"]
    error_feedback: bool = True
    """Off for comparison only."""


class RandomKConfig(SparseConfig):
    """Random elements, the same on every rank."""

    name: Literal["randomk"]
    error_feedback: bool = True


class DGCConfig(LargestConfig):
    """Deep Gradient Compression (Lin et al. 2018); the optimizer must have no momentum."""

    name: Literal["dgc"]
    density: float = Field(default=0.001, gt=0, le=1)
    """Part of the elements that is sent at a step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True
    masking: bool = True
    """Stop the momentum of elements that were just sent."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Each rank clips its gradients to this over the square root of the number of ranks."""


class PowerSGDConfig(Section):
    """Products of two thin matrices (Vogels et al. 2019)."""

    name: Literal["powersgd"]
    rank: int = Field(default=4, ge=1)
    stages: list[RankStage] = Field(default=[])
    """Other ranks for the first steps, bounds rising."""
    min_compression: float = Field(default=2.0, ge=1)
    """Tensors that become smaller by less than this travel dense."""
    warm_start: bool = True
    """Start from the last step's result."""
    error_feedback: bool = True
    """Off for comparison only."""


class OneBitAdamConfig(Section):
    """Adam's first moment in one bit an element (Tang et al. 2021); with optimizer.name=onebit_adam."""

    name: Literal["onebit_adam"]


CodecConfig = Annotated[
    NoneConfig
    | Fp16Config
    | Bf16Config
    | OneBitConfig
    | ScaledSignConfig
    | QSGDConfig
    | NormSparsifierConfig
    | ThresholdConfig
    | AdaptiveConfig
    | TopKConfig
    | DGCConfig
    | RandomKConfig
    | PowerSGDConfig
    | OneBitAdamConfig,
    Field(discriminator="name"),
]

CODEC_NAMES = (
    "none",
    "fp16",
    "bf16",
    "onebit",
    "scaled_sign",
    "qsgd",
    "norm_sparsifier",
    "threshold",
    "adaptive",
    "topk",
    "dgc",
    "randomk",
    "powersgd",
    "onebit_adam",
)
