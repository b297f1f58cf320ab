"""The settings of the learning rate's schedule: a warm-up, a decay, and the places of changes."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from conf.sections.section import NamedSection, Section

_UNITS = ("steps", "epochs", "fraction")


class Boundary(Section):
    """A place in the run, in one of three units."""

    steps: int | None = Field(default=None, ge=0)
    """Number of optimizer steps since the beginning, independent of the length of the run."""
    epochs: float | None = Field(default=None, ge=0)
    """Number of epochs since the beginning of a run of `schedule.recipe_epochs`; in proportion for other runs."""
    fraction: float | None = Field(default=None, ge=0, le=1)
    """Fraction of the run."""

    @model_validator(mode="before")
    @classmethod
    def _a_given_unit_replaces_the_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and any(values.get(unit) is not None for unit in _UNITS):
            return {**dict.fromkeys(_UNITS), **values}
        return values

    @model_validator(mode="after")
    def _one_unit(self) -> "Boundary":
        given = {unit: value for unit in _UNITS if (value := getattr(self, unit)) is not None}
        if len(given) != 1:
            text = " and ".join(f"{unit}={value}" for unit, value in given.items()) or "none"
            raise ValueError(f"a place in schedule has exactly one of {', '.join(_UNITS)}, got {text}")
        return self

    @model_serializer(mode="wrap")
    def _only_its_unit(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key not in _UNITS or value is not None}

    def in_epochs(self, recipe_epochs: float) -> float | None:
        """Return the place in epochs of a run of this length; None: the place is given in steps."""
        return self.fraction * recipe_epochs if self.fraction is not None else self.epochs


class EpochsWarmup(Boundary, NamedSection):
    """The end of a warm-up, in epochs by default."""

    epochs: float | None = Field(default=5, ge=0)
    """Number of epochs since the beginning of a run of `schedule.recipe_epochs`; in proportion for other runs."""


class NoWarmupConfig(NamedSection):
    """No warm-up: the first step has the peak."""

    name: Literal["none"] = "none"


class ConstantWarmupConfig(EpochsWarmup):
    """A constant part of the peak (Goyal et al. 2017, section 2.2)."""

    name: Literal["constant"] = "constant"
    factor: float = Field(default=0.1, gt=0)
    """Factor of the peak learning rate."""


class GradualWarmupConfig(EpochsWarmup):
    """A learning rate that rises to the peak, every step (Goyal et al. 2017, section 2.2)."""

    name: Literal["gradual"] = "gradual"
    start: Literal["zero", "base"] = "zero"
    """Start of the rise: 0, or the rate for a global batch of 256, `optimizer.learning_rate_per_256`."""


class ConstantConfig(NamedSection):
    """The peak learning rate until the end."""

    name: Literal["constant"] = "constant"


class Milestone(Boundary):
    """From this place on, the learning rate is the peak times `factor`."""

    factor: float = Field(gt=0)
    """Factor of the peak learning rate, not of the previous rate."""


class MultiStepConfig(NamedSection):
    """Milestones, each with a factor of the peak (Goyal et al. 2017, section 5.1)."""

    name: Literal["multi_step"] = "multi_step"
    milestones: list[Milestone] = Field(
        default=[
            Milestone(epochs=30, factor=0.1),
            Milestone(epochs=60, factor=0.01),
            Milestone(epochs=80, factor=0.001),
        ],
        min_length=1,
    )
    """Milestones in rising order, none of them within the warm-up."""


class SmoothDecay(Boundary, NamedSection):
    """The end of a decay after the warm-up, as a fraction of the run by default."""

    fraction: float | None = Field(default=1.0, ge=0, le=1)
    """Fraction of the run after which the end rate holds."""
    end_rate: float = Field(default=0.0, ge=0)
    """Learning rate at the end of the decay."""


class PolynomialConfig(SmoothDecay):
    """A power of the remaining part of the run after the warm-up (MLPerf: power 2)."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(default=2.0, gt=0)
    """Exponent; 1 is a straight line."""


class CosineConfig(SmoothDecay):
    """Half a period of a cosine after the warm-up (Loshchilov and Hutter 2017, without restarts)."""

    name: Literal["cosine"] = "cosine"


WarmupConfig = Annotated[NoWarmupConfig | ConstantWarmupConfig | GradualWarmupConfig, Field(discriminator="name")]
DecayConfig = Annotated[MultiStepConfig | PolynomialConfig | CosineConfig | ConstantConfig, Field(discriminator="name")]


class ScheduleConfig(Section):
    """Learning rate over the run, a pure function of the step."""

    recipe_epochs: float | None = Field(default=90, gt=0)
    """Length of the run for which this section and `input.resolution_schedule` state epochs: a shorter or longer run
    keeps the shape. Null: epochs are not scaled."""
    warmup: WarmupConfig = GradualWarmupConfig()
    decay: DecayConfig = MultiStepConfig()

    def places(self) -> list[tuple[str, Boundary]]:
        """Return every place by its key, in the required order."""
        milestones = self.decay.milestones if isinstance(self.decay, MultiStepConfig) else []
        named = [
            ("schedule.warmup", self.warmup),
            *((f"schedule.decay.milestones[{number}]", place) for number, place in enumerate(milestones)),
            ("schedule.decay", self.decay),
        ]
        return [(name, place) for name, place in named if isinstance(place, Boundary)]

    def check_in_epochs(self, places: Sequence[tuple[str, Boundary]], run_epochs: int) -> None:
        """Check the places that are not in steps, of this schedule or of one with the same unit of epochs.

        Args:
            places: Places by key, in the required order.
            run_epochs: Length of the run.

        Raises:
            ValueError: A place is beyond the end, or before the place that must precede it.
        """
        end = self.recipe_epochs or run_epochs
        known = [(name, epoch) for name, place in places if (epoch := place.in_epochs(end)) is not None]
        key = "schedule.recipe_epochs" if self.recipe_epochs else "training.epochs"
        check_rising(known, end, unit="epoch", end_text=f"{key}={end:g}")


def check_rising(places: Sequence[tuple[str, float]], end: float, *, unit: str, end_text: str) -> None:
    """Check that places are in order and within a run.

    Raises:
        ValueError: A place is out of order or beyond the end; the message names the first one.
    """
    for (before, start), (name, place) in itertools.pairwise([("the beginning", 0.0), *places]):
        if place > end:
            raise ValueError(f"{name} is at {unit} {place:g}, beyond the end of the run ({end_text})")
        if place < start:
            raise ValueError(f"{name} is at {unit} {place:g}, before {before} at {unit} {start:g}: must rise")
