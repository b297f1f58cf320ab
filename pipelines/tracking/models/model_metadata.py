"""The metadata of a model: the meaning of its outputs, and its training data."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter


@dataclass(frozen=True)
class SplitSamples:
    """The samples of one split."""

    rows: int
    of_class: tuple[int, ...]
    """Positives of each class, in the order of the model's outputs."""


@dataclass(frozen=True)
class ModelMetadata:
    """The facts that a user of a model must know.

    For a model that Groundswell has not logged, only the run is known; all other fields have their defaults.
    """

    class_names: tuple[str, ...] = ()
    """Names of the classes, in the order of the model's outputs."""
    task: str = ""
    """`multi_label` or `single_label`."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the bands of each image group that the model takes, in the order of the last axis."""
    bands: tuple[str, ...] | None = None
    """All bands that the network sees, in the order of its first layer; None: unknown."""
    thresholds: tuple[float, ...] | None = None
    """Least probability of each predicted class, tuned on validation; None: the model has no thresholds."""
    archive: str | None = None
    """Kind of the dataset's archive."""
    dataset_fingerprint: str | None = None
    source_fingerprint: str | None = None
    """Digest of the archive's index."""
    samples: Mapping[str, SplitSamples] = field(default_factory=dict)
    """Samples of each split, by its name."""
    network: dict[str, Any] | None = None
    """The section `model` of the configuration."""
    ema: float | None = None
    """Decay of the weights' average; None: the weights are those of the last step."""
    optimizer_steps: int = 0
    """Steps that the model has seen."""
    run_id: str | None = None
    """The run that created the model; None: unknown."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelMetadata":
        """Read the metadata from a store; for a model that Groundswell has not logged, only its run."""
        if "class_names" not in values:
            return cls(run_id=values.get("run_id"))
        groups = {group["name"]: group["bands"] for group in values.get("groups", [])}
        return TypeAdapter(cls).validate_python({**values, "groups": groups})

    def as_json(self) -> dict[str, Any]:
        """Return the metadata for a store, without unknown values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        values["groups"] = [{"name": name, "bands": list(bands)} for name, bands in self.groups.items()]
        return {name: value for name, value in values.items() if value not in (None, "", [], {})}
