"""The settings of the gradient exchange, and of every codec, by name; their defaults are stated here only."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from conf.sections.section import NamedSection, Section


class CodecMember(NamedSection):
    """The settings that all codecs share."""

    @property
    def keeps_residual(self) -> bool:
        """Whether the residual, which was not sent, is added to the next gradient."""
        return bool(getattr(self, "error_feedback", False))

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor, with a schedule as pairs of a step and a value."""
        return {
            key: [tuple(entry.values()) for entry in value] if key.endswith("_schedule") else value
            for key, value in super().arguments().items()
        }


class AlwaysWithResidual(CodecMember):
    """The settings of codecs that require error feedback."""

    error_feedback: ClassVar[bool] = True


class ResidualByDefault(CodecMember):
    """The settings of codecs that have error feedback unless the user turns it off."""

    error_feedback: bool = True
    """Whether the residual is added to the next gradient; false is for comparison only."""


class NoneConfig(CodecMember):
    """Float32, 4 bytes per element."""

    name: Literal["none"] = "none"


class Fp16Config(CodecMember):
    """Half floats."""

    name: Literal["fp16"] = "fp16"
    prescale: float = Field(default=1.0, gt=0)
    """Factor before the rounding that is divided out after it: it shifts the window from 6e-8 to 65504. Without
    `sum_in_float32`, gradients are divided by the number of workers before the rounding: with many workers, set about
    that number."""
    sum_in_float32: bool = False
    """Send half floats as bytes and sum them in float32: faster on CPUs, one more rounding."""


class Bf16Config(CodecMember):
    """Brain floats, summed in float32."""

    name: Literal["bf16"] = "bf16"
    prescale: float = Field(default=1.0, gt=0)
    """Factor before the rounding that is divided out after it."""
    error_feedback: bool = False
    """Whether the rounding error is added to the next gradient."""


class OneBitConfig(ResidualByDefault):
    """One bit per element, two means per column (Seide et al. 2014)."""

    name: Literal["onebit"] = "onebit"


class ScaledSignConfig(ResidualByDefault):
    """One bit per element, one scale per tensor (Karimireddy et al. 2019)."""

    name: Literal["scaled_sign"] = "scaled_sign"


class QSGDConfig(CodecMember):
    """Stochastic rounding to a few levels (Alistarh et al. 2017)."""

    name: Literal["qsgd"] = "qsgd"
    bits: int = Field(default=4, ge=2, le=8)
    """Bits per element, for 2**(bits - 1) - 1 levels on each side of 0."""
    bucket_size: int = Field(default=512, ge=8, multiple_of=8)
    """Number of elements that share a norm."""
    norm: Literal["l2", "max"] = "max"
    """`l2` is the theorem's norm; `max` has the smaller error in large buckets."""
    owner_bits: int | None = None
    """Bits per element in which the mean is sent, 2 to 8, or 32 for the exact mean; null: as `bits`."""
    error_feedback: bool = False
    """Whether the rounding error is added to the next gradient."""

    @field_validator("owner_bits")
    @classmethod
    def _quantised_or_exact(cls, bits: int | None) -> int | None:
        if bits is not None and bits not in (*range(2, 9), 32):
            raise ValueError(f"exchange.codec.owner_bits={bits}: should be 2 to 8, or 32 for the exact mean")
        return bits


class NormSparsifierConfig(CodecMember):
    """Each element is sent with a probability in proportion to its magnitude (QSGD with one level, as a list)."""

    name: Literal["norm_sparsifier"] = "norm_sparsifier"
    exact_mean: bool = True
    """Whether the exact mean is sent; otherwise its elements are drawn again, with 15 to 25 times the error."""


class ThresholdConfig(AlwaysWithResidual):
    """Plus or minus tau for every element with a residual of at least tau (Strom 2015)."""

    name: Literal["threshold"] = "threshold"
    tau: float = Field(gt=0)
    """Threshold in units of the gradient; it should be near the magnitude of large gradients."""


class Until(Section):
    """A value that holds for the first steps of a run."""

    before_step: int = Field(gt=0)
    """First step at which this value no longer holds; with `training.mode=local` the first exchange."""


class DensityUntil(Until):
    """A density that holds for the first steps of a run."""

    density: float = Field(gt=0, le=1)
    """Part of the elements that is sent at a step."""


class RankUntil(Until):
    """A rank that holds for the first steps of a run."""

    rank: int = Field(ge=1)
    """Number of columns of each factor."""


def _check_rising(entries: Sequence[Until], info: ValidationInfo) -> Sequence[Until]:
    bounds = [entry.before_step for entry in entries]
    if bounds != sorted(set(bounds)):
        raise ValueError(f"exchange.codec.{info.field_name} must have rising values of before_step, got {bounds}")
    return entries


class SparseConfig(CodecMember):
    """The settings of codecs that send a part of the elements."""

    density: float = Field(default=0.01, gt=0, le=1)
    """Part of the elements that is sent at a step."""
    density_schedule: Annotated[list[DensityUntil], AfterValidator(_check_rising)] = Field(default=[])
    """Other densities for the first steps, by rising `before_step`."""


class AdaptiveConfig(SparseConfig, AlwaysWithResidual):
    """The largest positive and negative elements, each sent as the mean of its sign (Dryden et al. 2016)."""

    name: Literal["adaptive"] = "adaptive"


class LargestConfig(SparseConfig):
    """The settings of codecs that send the largest elements."""

    owner_factor: float = Field(default=2.0, ge=1)
    """The owner of a part sends this many times as many elements of the sum as of its own gradient."""


class TopKConfig(ResidualByDefault, LargestConfig):
    """The largest elements (Aji and Heafield 2017)."""

    name: Literal["topk"] = "topk"


class RandomKConfig(SparseConfig):
    """Random elements, the same on every rank."""

    name: Literal["randomk"] = "randomk"
    error_feedback: bool = True
    """Whether the residual is added to the next gradient; otherwise the elements are scaled to be unbiased."""


class DGCConfig(LargestConfig, AlwaysWithResidual):
    """Deep Gradient Compression (Lin et al. 2018); the optimizer must have no momentum."""

    name: Literal["dgc"] = "dgc"
    density: float = Field(default=0.001, gt=0, le=1)
    """Part of the elements that is sent at a step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the velocities that are accumulated before the selection."""
    nesterov: bool = True
    """Whether to use Nesterov momentum, which looks one momentum step ahead."""
    masking: bool = True
    """Whether the momentum of an element stops when the element is sent."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Each rank clips its gradients to this norm, divided by the square root of the number of ranks; null: no
    clipping."""


class PowerSGDConfig(ResidualByDefault):
    """Products of two thin matrices (Vogels et al. 2019)."""

    name: Literal["powersgd"] = "powersgd"
    rank: int = Field(default=4, ge=1)
    """Number of columns of each factor."""
    rank_schedule: Annotated[list[RankUntil], AfterValidator(_check_rising)] = Field(default=[])
    """Other ranks for the first steps, by rising `before_step`."""
    min_compression: float = Field(default=2.0, ge=1)
    """Tensors that the codec compresses by less than this factor are sent in float32."""
    warm_start: bool = True
    """Whether each step starts from the previous step's result."""


class OneBitAdamCodecConfig(AlwaysWithResidual):
    """Adam's first moment in one bit per element (Tang et al. 2021); with optimizer.name=onebit_adam."""

    name: Literal["onebit_adam"] = "onebit_adam"
    scale: Literal["mean", "norm"] = "mean"
    """Magnitude of all sent elements. The mean magnitude has the smallest error; the Euclidean norm over the root of
    their number keeps the norm (DeepSpeed)."""


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
    | OneBitAdamCodecConfig,
    Field(discriminator="name"),
]
OVERFLOW_REMEDIES = {
    "fp16": "a half float holds up to 65,504 / exchange.codec.prescale: lower exchange.codec.prescale, choose "
    "exchange.codec=bf16 or none, or lower the learning rate"
}
"""Actions when a mean of gradients exceeds the range of a codec, for codecs whose range is smaller than float32's."""


class ExchangeConfig(Section):
    """The settings of the messages between the ranks."""

    codec: CodecConfig = NoneConfig()
    """The codec's name with its settings; a name alone takes the defaults."""
    dense_below: int = Field(default=1024, ge=0)
    """Tensors with fewer elements are sent in float32, as all biases and gains are."""
    bucket_mib: float | None = Field(default=8.0, gt=0)
    """Largest size of a bucket of gradients that are sent together, last layers first, during the backward pass; null:
    one bucket."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps in which everything is sent in float32; with `training.mode=local`, of first
    exchanges."""
    rescale_residual: bool = True
    """Whether the residual is rescaled when the learning rate changes, so that its updates keep their size."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the exchange, without the codec."""
        return self.model_dump(exclude={"codec"})
