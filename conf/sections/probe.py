"""The settings of linear classifiers on the frozen features of a model."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from conf.sections.section import NamedSection, Section


class LBFGSConfig(NamedSection):
    """Logistic regression by L-BFGS: multinomial, or one regression per class where samples have several labels."""

    name: Literal["lbfgs"] = "lbfgs"
    max_iterations: int = Field(default=1000, gt=0)
    """Largest number of iterations for one penalty; a log line names penalties with too few."""
    tolerance: float = Field(default=1e-6, gt=0)
    """Tolerance of a fit: the largest component of the mean loss's gradient at which it ends."""


class CoCoAConfig(NamedSection):
    """Support-vector machines, each class against the rest, by dual coordinate ascent on all ranks (Ma et al. 2015)."""

    name: Literal["cocoa"] = "cocoa"
    max_rounds: int = Field(default=1000, gt=0)
    """Largest number of rounds for one penalty. Small penalties need many; a log line names those with too few."""
    tolerance: float = Field(default=1e-3, gt=0)
    """Tolerance of a fit: the largest duality gap of a class, which bounds how far its objective is above the
    minimum."""


SolverConfig = Annotated[LBFGSConfig | CoCoAConfig, Field(discriminator="name")]


class ProbeConfig(Section):
    """The settings with which `probe` fits a linear head on the features of a model."""

    output: str = Field(default="outputs/features", min_length=1)
    """Folder of the features, which later probes of the same model and dataset reuse. With several hosts, it is on
    storage that all of them mount, or a URL that fsspec supports (`s3://bucket/folder`)."""
    l2: list[Annotated[float, Field(gt=0)]] = Field(default=[1e-5, 1e-4, 1e-3, 1e-2, 1e-1], min_length=1)
    """Penalties on the squared weights, for standardised features and the mean loss; the validation split chooses one.
    Scikit-learn's C is 1 / (l2 times the training samples)."""
    solver: SolverConfig = LBFGSConfig()
    """Loss function and solver."""

    @field_validator("l2", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value

    @field_validator("l2")
    @classmethod
    def _each_once(cls, penalties: list[float]) -> list[float]:
        if len({*penalties}) < len(penalties):
            raise ValueError(f"probe.l2={penalties}: the same penalty is there twice")
        return penalties
