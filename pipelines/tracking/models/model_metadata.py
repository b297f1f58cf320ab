"""The metadata of a model, the meaning of its outputs and its training data, and the model card."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

CARD_FILE = "model_card.md"
Card = Callable[[Mapping[str, float]], str]
"""A function from the metrics of a model to the text of its card."""
_RECIPE = ("model", "optimizer", "schedule", "training", "input", "exchange")
_NO_SCORES = ("epoch", "exchange", "speed", "summary", "system", "time")
"""Groups of metrics about the training and its machines, and not about the model."""


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
        """Read the metadata from a store; for a model that Groundswell has not logged, only its run.

        Raises:
            ValueError: A value has another type; the message names it.
        """
        if "class_names" not in values:
            return cls(run_id=values.get("run_id"))
        groups = {group["name"]: group["bands"] for group in values.get("groups", [])}
        try:
            return TypeAdapter(cls).validate_python({**values, "groups": groups})
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"the metadata of the model cannot be used: {place}: {problem['msg']}") from None

    def as_json(self) -> dict[str, Any]:
        """Return the metadata for a store, without unknown values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        values["groups"] = [{"name": name, "bands": list(bands)} for name, bands in self.groups.items()]
        return {name: value for name, value in values.items() if value not in (None, "", [], {})}


def model_card(name: str, metadata: ModelMetadata, parameters: Mapping[str, str], metrics: Mapping[str, float]) -> str:
    """Write a model card in Markdown.

    Args:
        name: Title.
        metadata: Metadata of the model.
        parameters: Parameters of the run, `section.key` -> value.
        metrics: Metrics at the step of the model; the card shows the scores among them.

    Source: Mitchell et al. (2019), "Model Cards for Model Reporting", for the sections.
    """
    names, task = metadata.class_names, metadata.task.replace("_", "-")
    thresholds = dict(zip(names, metadata.thresholds or (), strict=False))
    source = metadata.source_fingerprint
    recipe = {key: value for key, value in sorted(parameters.items()) if key.partition(".")[0] in _RECIPE}
    scores = {key: value for key, value in sorted(metrics.items()) if key.partition("/")[0] not in _NO_SCORES}
    lines = [
        f"# {name}",
        "",
        f"A {task} classifier of {len(names)} classes. It takes raw pixels at their native resolution; upsampling and "
        "normalisation are layers of the model.",
        "",
        "## Input and output",
        *(f"* `{group}`: bands {', '.join(bands)}" for group, bands in metadata.groups.items()),
        f"* Output: one probability per class, in this order: {', '.join(names)}.",
        *(["", "## Thresholds", "Those with the largest F1 of each class on the validation split:"] * bool(thresholds)),
        *(f"* {name}: {threshold:.4f}" for name, threshold in thresholds.items()),
        "",
        "## Data",
        f"* Archive: {metadata.archive}",
        f"* Dataset fingerprint: `{metadata.dataset_fingerprint}`",
        *([f"* Fingerprint of the archive's index: `{source}`"] if source else []),
        "* Source, dates and licence are the archive's; they are not recorded here.",
        *_counts(metadata.samples, names),
        "",
        "## Recipe",
        *(f"* `{key}`: {value}" for key, value in recipe.items()),
        "",
        "## Scores",
        *([f"* {key}: {value:.4f}" for key, value in scores.items()] or ["* none were recorded"]),
        "",
        "## Limits",
        "* The scores are of the dataset above. Other regions, seasons, sensors and processing levels were not "
        "measured here.",
        "* Probabilities are not calibrated by themselves: `groundswell evaluate` measures how far they can be "
        "trusted, and the scores by country, season and tile.",
        "* The classes are those of the archive's labels, with their errors.",
        "",
    ]
    return "\n".join(lines)


def _counts(samples: Mapping[str, SplitSamples], names: Sequence[str]) -> list[str]:
    """Return a table of the samples of each split, all and by class."""
    if not samples:
        return []
    splits = sorted(samples)
    columns = [[samples[split].rows, *samples[split].of_class] for split in splits]
    rows = [
        f"| {name} | {' | '.join(f'{count:,}' for count in counts)} |"
        for name, *counts in zip(["all", *names], *columns, strict=True)
    ]
    return ["", f"| samples | {' | '.join(splits)} |", "|---" * (len(splits) + 1) + "|", *rows]
