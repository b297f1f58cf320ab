"""The settings of every codec, by name."""

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field

from conf.section import Section


class NoneConfig(Section):
    """Gradients travel as float32: 4 bytes per element, nothing is lost."""

    name: Literal["none"]


class Fp16Config(Section):
    """Gradients travel as half floats: 2 bytes per element."""

    name: Literal["fp16"]
    prescale: float = Field(default=1.0, gt=0)
    """Factor before the rounding, divided out after it; it shifts the range of 6e-8 to 65504."""
    sum_in_float32: bool = False
    """Whether halves are sent as bytes and summed in float32: faster on CPUs, one more rounding."""


class Bf16Config(Section):
    """Gradients travel as bfloat16, 2 bytes per element, and are summed in float32."""

    name: Literal["bf16"]
    prescale: float = Field(default=1.0, gt=0)
    """Factor before the rounding, divided out after it."""
    error_feedback: bool = False
    """Whether what the rounding loses is added to the next gradient."""


class OneBitConfig(Section):
    """One bit per element and two means per column (Seide et al. 2014)."""

    name: Literal["onebit"]
    error_feedback: bool = True
    """Whether what was not sent is added to the next gradient; false is for comparison only."""


class ScaledSignConfig(Section):
    """One bit per element and one scale per tensor (Karimireddy et al. 2019)."""

    name: Literal["scaled_sign"]
    error_feedback: bool = True
    """Whether what was not sent is added to the next gradient; false is for comparison only."""


class QSGDConfig(Section):
    """Elements are rounded at random to a few levels (Alistarh et al. 2017)."""

    name: Literal["qsgd"]
    bits: int = Field(default=4, ge=2, le=8)
    """Bits per element; there are 2**(bits - 1) - 1 levels on each side of 0."""
    bucket_size: int = Field(default=512, ge=8, multiple_of=8)
    """Number of elements that share a norm."""
    norm: Literal["l2", "max"] = "max"
    """The norm of the theorem (l2), or the one with the smaller error in large buckets (max)."""
    error_feedback: bool = False
    """Whether what was not sent is added to the next gradient."""


class NormSparsifierConfig(Section):
    """Elements are sent with a probability that grows with their magnitude (QSGD with one level, as a list)."""

    name: Literal["norm_sparsifier"]


class ThresholdConfig(Section):
    """Elements beyond a threshold are sent as plus or minus tau (Strom 2015)."""

    name: Literal["threshold"]
    tau: float = Field(gt=0)
    """Threshold in units of the gradient, near the magnitude of its large elements."""


class DensityStage(Section):
    """Another density for the first steps of a run."""

    before_step: int = Field(gt=0)
    """Optimizer step at which the stage ends."""
    density: float = Field(gt=0, le=1)
    """Fraction of the elements that is sent per step."""


class RankStage(Section):
    """Another rank for the first steps of a run."""

    before_step: int = Field(gt=0)
    """Optimizer step at which the stage ends."""
    rank: int = Field(ge=1)
    """Rank of the approximation."""


Stage = TypeVar("Stage", DensityStage, RankStage)


def _rising(stages: list[Stage]) -> list[Stage]:
    bounds = [stage.before_step for stage in stages]
    if bounds != sorted(set(bounds)):
        raise ValueError(f"exchange.codec.stages must have rising bounds, got before_step {bounds}")
    return stages


class SparseConfig(Section):
    """Codecs that send a part of the elements."""

    density: float = Field(default=0.01, gt=0, le=1)
    """Fraction of the elements that is sent per step."""
    stages: Annotated[list[DensityStage], AfterValidator(_rising)] = Field(default=[])
    """Other densities for the first steps; their bounds rise."""


class AdaptiveConfig(SparseConfig):
    """The largest positive and the largest negative elements, each side sent as its mean (Dryden et al. 2016)."""

    name: Literal["adaptive"]


class LargestConfig(SparseConfig):
    """Codecs that send the largest elements."""

    owner_factor: float = Field(default=2.0, ge=1)
    """A rank that sums a part for all ranks passes on this many times the elements that each rank sends."""


class TopKConfig(LargestConfig):
    """The largest elements, sent with their places (Aji and Heafield 2017)."""

    name: Literal["topk"]
    error_feedback: bool = True
    """Whether what was not sent is added to the next gradient; false is for comparison only."""


class RandomKConfig(SparseConfig):
    """Random elements, the same on every rank."""

    name: Literal["randomk"]
    error_feedback: bool = True
    """Whether what was not sent is added to the next gradient; false is for comparison only."""


class DGCConfig(LargestConfig):
    """Deep Gradient Compression (Lin et al. 2018); the optimizer must have no momentum."""

    name: Literal["dgc"]
    density: float = Field(default=0.001, gt=0, le=1)
    """Fraction of the elements that is sent per step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of the velocities that each rank accumulates."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""
    masking: bool = True
    """Whether the momentum of elements that were just sent is stopped."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Norm to which each rank clips its gradients, divided by the square root of the number of ranks; null: none."""


class PowerSGDConfig(Section):
    """Each matrix is approximated by a product of two thin ones (Vogels et al. 2019)."""

    name: Literal["powersgd"]
    rank: int = Field(default=4, ge=1)
    """Rank of the approximation."""
    stages: Annotated[list[RankStage], AfterValidator(_rising)] = Field(default=[])
    """Other ranks for the first steps; their bounds rise."""
    min_compression: float = Field(default=2.0, ge=1)
    """Tensors that would become smaller by a lower factor travel in float32."""
    warm_start: bool = True
    """Whether each step starts from the result of the last."""
    error_feedback: bool = True
    """Whether what was not sent is added to the next gradient; false is for comparison only."""


class OneBitAdamConfig(Section):
    """Adam's first moment in one bit per element (Tang et al. 2021); needs optimizer.name=onebit_adam."""

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
