"""A digest of everything that determines the result of a training."""

import hashlib
import json
from pathlib import Path
from typing import Any

from conf.keys import TAGS
from conf.schema import RunConfig
from conf.sections.section import Section

NAMED_DIGITS = 6  # of a digest, in the name of a run
_SECTIONS = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_OF_THE_ORDER = ("name", "cache_limit_gib")
"""Settings of the reader that may change the order of samples."""
_WITHOUT_INFLUENCE = ("output", "resume_run", "checkpoint_every_steps", "trace_steps", "tensorflow_profiler")


def training_digest(config: RunConfig, dataset_fingerprint: str) -> str:
    """Return a digest of the dataset's content, the recipe and the number of workers.

    The digest is the same on every machine, because it includes the content of a weight file, not its path. Settings
    with their default value are left out. A version of this program with more settings therefore still finds earlier
    trainings. Versions of packages are left out too.

    Args:
        config: The configuration.
        dataset_fingerprint: Fingerprint of its dataset (`Manifest.fingerprint`).

    Raises:
        FileNotFoundError: The weight file does not exist.
    """
    recipe = {name: _chosen(getattr(config, name)) for name in _SECTIONS}
    for key in _WITHOUT_INFLUENCE:
        recipe["training"].pop(key, None)
    if config.warm_start.source is not None and not config.warm_start.is_logged:
        recipe["warm_start"]["source"] = _content(Path(config.warm_start.source))
    factors = recipe["warm_start"].get("rate_factors", {})
    if list(factors) != sorted(factors):  # if several patterns match a variable, the last one counts
        recipe["warm_start"]["rate_factors"] = list(factors.items())
    reader = _chosen(config.reader)
    order = {key: reader[key] for key in _OF_THE_ORDER if key in reader and reader[key] != config.reader.default(key)}
    if order:
        recipe["reader"] = order
    values = {"dataset": dataset_fingerprint, "workers": config.launch.num_workers, **recipe}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]


def _content(file: Path) -> str:
    if not file.exists():
        raise FileNotFoundError(f"warm_start.source={file} does not exist")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _chosen(section: Section) -> dict[str, Any]:
    """Return the values that differ from their defaults, and the tags of unions."""
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
