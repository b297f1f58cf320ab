"""What is logged beside a model: the meaning of its outputs, and the data that it saw."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class SplitSamples:
    """The samples of one split."""

    rows: int
    of_class: tuple[int, ...]
    """Positives of each class, in the order of the model's outputs."""


@dataclass(frozen=True)
class ModelMetadata:
    """What whoever loads a model must know.

    Of a model that Groundswell has not logged only its run is known: all else has the default.
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
    """Least probability of each predicted class, tuned on validation; None: it has none."""
    archive: str | None = None
    """Kind of the archive of which the dataset was made."""
    dataset_fingerprint: str | None = None
    source_fingerprint: str | None = None
    """Digest of the archive's index."""
    samples: Mapping[str, SplitSamples] = field(default_factory=dict)
    """Samples of each split, by its name."""
    network: JsonObject | None = None
    """The section `model` of the configuration."""
    ema: float | None = None
    """Decay of the weights' average; None: the weights are those of the last step."""
    optimizer_steps: int = 0
    """Steps that the model has seen."""
    run_id: str | None = None
    """The run that made it; None: unknown."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelMetadata":
        """Read what a store has; of a model that was not logged by Groundswell, only its run."""
        if "class_names" not in values:
            return cls(run_id=values.get("run_id"))
        found = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        for name in ("class_names", "bands", "thresholds"):
            if found.get(name) is not None:
                found[name] = tuple(found[name])
        found["groups"] = {group["name"]: tuple(group["bands"]) for group in values.get("groups", [])}
        found["samples"] = {
            name: SplitSamples(split["rows"], tuple(split["of_class"]))
            for name, split in values.get("samples", {}).items()
        }
        return cls(**found)

    def as_json(self) -> JsonObject:
        """Return what a store keeps; what is unknown is left out."""
        values: JsonObject = json.loads(json.dumps(asdict(self)))
        values["groups"] = [{"name": name, "bands": list(bands)} for name, bands in self.groups.items()]
        return {name: value for name, value in values.items() if value not in (None, "", [], {})}
