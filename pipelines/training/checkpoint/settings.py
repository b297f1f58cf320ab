"""The settings that a checkpoint was written with, and which of them a resumed run may change."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from conf.schema import RunConfig
from conf.sections.optimizers import SGDConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.storage.remote_path import AnyPath
from pipelines.training.checkpoint.state import TrainingState

_SECTIONS = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_NO_SETTINGS = ("training.resume_run", "training.output")
_PACKAGES = ("groundswell", "keras", "tensorflow")
_LAYOUT = "training.mode.layout"
"""Key by which the layout of the mode's checkpoints is recorded, beside its settings."""
_FIXED = (
    "optimizer.name",
    "optimizer.variant",
    "optimizer.warmup_steps",  # the number of updates of a second moment, by which its bias is corrected
    _LAYOUT,
    "warm_start.frozen_layers",
)
_FIXED_WITH_EXCHANGE_STATE = (
    "exchange.dense_below",
    *(
        f"exchange.codec.{name}"
        for name in (
            "name",
            "error_feedback",
            "rank",
            "rank_schedule",
            "warm_start",
            "min_compression",
            "owner_bits",
            "bucket_size",
        )
    ),
)
"""Settings that decide what an exchange keeps from one step to the next, and its shapes."""
_MAY_CHANGE = ("input.augmentation.", "input.resolution_schedule", "model.dropout", "model.batch_norm_ranks")


def recorded_settings(config: RunConfig) -> dict[str, str]:
    """Everything that decides what a step does, by key, and the versions of the packages that matter."""
    values = {name: str(value) for section in _SECTIONS for name, value in _flat(section, getattr(config, section))}
    values[_LAYOUT] = config.training.mode.declaration.layout
    values["launch.num_workers"] = str(config.launch.num_workers)
    versions = {f"version.{package}": found for package in _PACKAGES if (found := _version(package))}
    return {name: value for name, value in values.items() if name not in _NO_SETTINGS} | versions


def check_same_training(checkpoint: AnyPath, state: TrainingState, config: RunConfig, manifest: Manifest) -> None:
    """Check that a checkpoint's state fits the training that is to continue from it.

    Refused are: other data, another seed or global batch size, which change the order of samples and the meaning of a
    step; other bands, another network, optimizer, loss scale or mode, or other frozen layers, whose variables are
    others or mean something else; another codec where the old one left something to send, or parameters of it that
    decide what it keeps. Every other setting may change from here on: rates, schedules, epochs, a codec's other
    parameters, augmentation, dropout.

    Raises:
        ValueError: Names every setting that differs, with both values and what to do.
    """
    fixed = [
        ("the dataset's fingerprint", state.dataset_fingerprint, manifest.fingerprint),
        ("training.seed", str(state.seed), str(config.training.seed)),
        ("the global batch size", str(state.global_batch_size), str(config.global_batch_size)),
    ]
    now, then = recorded_settings(config), state.settings
    # Those of a network by import path are the arguments of its function, each of which may be left out.
    arguments = {name for name in then.keys() ^ now.keys() if name.startswith("model.settings.")}
    fixed += [(name, then.get(name, "not set"), now.get(name, "not set")) for name in sorted(arguments)]
    for name in sorted(then.keys() & now.keys()):
        network = name.startswith(("model.", "input.")) and not name.startswith(_MAY_CHANGE)
        exchange = name in _FIXED_WITH_EXCHANGE_STATE and state.exchange_ranks > 0
        if network or exchange or name in _FIXED:
            fixed.append((name, then[name], now[name]))
    # A checkpoint holds the averages or none; their decay may change.
    before, after = then["training.ema"], now["training.ema"]
    if "None" in (before, after):
        fixed.append(("training.ema", before, after))
    before, after = then["training.precision"], now["training.precision"]
    if "float16" in (before, after):  # only half floats have a loss scale
        fixed.append(("training.precision", before, after))
    name = "optimizer.momentum"
    if isinstance(config.optimizer, SGDConfig) and "0.0" in (then.get(name), now[name]):
        fixed.append((name, then.get(name, now[name]), now[name]))  # without momentum it has no variable, as LARS has
    differences = [f"{name} was {before}, is {after}" for name, before, after in fixed if before != after]
    if differences:
        raise ValueError(
            f"{checkpoint} is of another training: {'; '.join(differences)}. Set them as they were, or start a new run"
        )


def check_same_order(checkpoint: AnyPath, state: TrainingState, order: str) -> None:
    """Check that what is left of a checkpoint's epoch would be read in the same order as what was read of it.

    Raises:
        ValueError: Names both orders, which are as `TrainingInput.order`, and what to do.
    """
    if state.is_within_an_epoch and state.order != order:
        raise ValueError(
            f"{checkpoint} was written within an epoch of {state.order}, now it is {order}: set reader.name and "
            "reader.cache_limit_gib as they were"
        )


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    fields = value if isinstance(value, Mapping) else value.model_dump(mode="json")
    flat: list[tuple[str, Any]] = []
    for name, inner in fields.items():
        key = f"{prefix}.{name}"
        flat += _flat(key, inner) if isinstance(inner, Mapping) else [(key, inner)]
    return flat


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
