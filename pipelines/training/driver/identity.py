"""A name for everything that decides what comes out of a training."""

import hashlib
import json
from pathlib import Path
from typing import Any

from conf.keys import TAGS
from conf.schema import RunConfig
from conf.sections.section import Section

_SECTIONS = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_OF_THE_ORDER = ("name", "cache_limit_gib")
"""Settings of the reader on which the order of samples may depend."""
_WITHOUT_INFLUENCE = ("output", "resume_run", "checkpoint_every_steps", "trace_steps", "tensorflow_profiler")


def training_digest(config: RunConfig, dataset_fingerprint: str) -> str:
    """Return a digest of the dataset's content, the recipe and the number of workers.

    It is the same on every machine: of a file of weights its content counts, not its path. Settings that have their
    default do not count: a version of this program with more settings still finds what an earlier one has trained.
    Versions of packages do not count either.

    Args:
        config: The configuration.
        dataset_fingerprint: Fingerprint of its dataset (`Manifest.fingerprint`).

    Raises:
        FileNotFoundError: There is no such file of weights.
    """
    recipe = {name: _chosen(getattr(config, name)) for name in _SECTIONS}
    for key in _WITHOUT_INFLUENCE:
        recipe["training"].pop(key, None)
    if config.warm_start.source is not None and not config.warm_start.is_logged:
        recipe["warm_start"]["source"] = _content(Path(config.warm_start.source))
    factors = recipe["warm_start"].get("rate_factors", {})
    if list(factors) != sorted(factors):  # of several patterns that match a variable the last one counts
        recipe["warm_start"]["rate_factors"] = list(factors.items())
    reader = _chosen(config.reader)
    order = {key: reader[key] for key in _OF_THE_ORDER if key in reader and reader[key] != config.reader.default(key)}
    if order:
        recipe["reader"] = order
    values = {"dataset": dataset_fingerprint, "workers": config.launch.num_workers, **recipe}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]


def _content(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise FileNotFoundError(f"warm_start.source={file} does not exist") from None


def _chosen(section: Section) -> dict[str, Any]:
    """What differs from the defaults, and which member of a union it is."""
    values: dict[str, Any] = {}
    dumped = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            if inner := _chosen(value):
                values[name] = inner
        elif name in TAGS or value != section.default(name):
            values[name] = dumped[name]
    return values
