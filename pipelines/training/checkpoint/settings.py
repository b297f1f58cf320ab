"""The settings that a checkpoint records, and a check of those that a resumed run must not change."""

from collections.abc import Mapping

from conf.load import flat
from conf.schema import RunConfig
from conf.sections.optimizers import SGDConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.machine.versions import NOT_INSTALLED, OWN, version_of
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.state import TrainingState

_SECTIONS = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_NO_SETTINGS = ("training.resume_run", "training.output")
_PACKAGES = (OWN, "keras", "tensorflow-cpu", "tensorflow")  # a later one with the same name counts
_LAYOUT = "training.mode.layout"
"""The key that records the layout of the mode's checkpoints, in addition to its settings."""
_FIXED = (
    "optimizer.name",
    "optimizer.variant",
    "optimizer.warmup_steps",  # number of updates of a second moment, used to correct its bias
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
"""Settings that decide which state an exchange has between steps, and its shapes."""
_MAY_CHANGE = ("input.augmentation.", "input.resolution_schedule", "model.dropout", "model.batch_norm_ranks")


def recorded_settings(config: RunConfig) -> dict[str, str]:
    """Return all settings that affect a step, by key, and the versions of the relevant packages."""
    sections = {name: section.model_dump(mode="json") for name, section in config if name in _SECTIONS}
    values = {name: str(value) for name, value in flat(sections) if value != {}}
    values[_LAYOUT] = config.training.mode.declaration.layout
    values["launch.num_workers"] = str(config.launch.num_workers)
    versions = {package: version_of(package) for package in _PACKAGES}
    values |= {f"version.{name.removesuffix('-cpu')}": each for name, each in versions.items() if each != NOT_INSTALLED}
    return {name: value for name, value in values.items() if name not in _NO_SETTINGS}


def check_same_training(
    checkpoint: Location, state: TrainingState, settings: Mapping[str, str], global_batch_size: int, manifest: Manifest
) -> None:
    """Check that a checkpoint's state fits the training that continues from it.

    These changes are refused:
    * Other data, another seed or another global batch size: they change the order of samples and the meaning of a step.
    * Other bands, another network, optimizer, loss scale or mode, or other frozen layers: they change the variables.
    * Another codec if the old one has state, or other parameters of it that decide its state.

    Every other setting may change: rates, schedules, epochs, a codec's other parameters, augmentation, dropout.

    Args:
        checkpoint: The checkpoint.
        state: Its state.
        settings: Settings of the training that continues from it, see `recorded_settings`.
        global_batch_size: Samples per step of that training.
        manifest: Manifest of its dataset.

    Raises:
        ValueError: A setting differs. The error names every such setting, both values and what to do.
    """
    fixed = [
        ("the dataset's fingerprint", state.dataset_fingerprint, manifest.fingerprint),
        ("training.seed", str(state.seed), settings["training.seed"]),
        ("the global batch size", str(state.global_batch_size), str(global_batch_size)),
    ]
    now, then = settings, state.settings
    # The settings of a network by import path are the arguments of its function, and any of them may be left out.
    arguments = {name for name in then.keys() ^ now.keys() if name.startswith("model.settings.")}
    fixed += [(name, then.get(name, "not set"), now.get(name, "not set")) for name in sorted(arguments)]
    for name in sorted(then.keys() & now.keys()):
        network = name.startswith(("model.", "input.")) and not name.startswith(_MAY_CHANGE)
        exchange = name in _FIXED_WITH_EXCHANGE_STATE and state.exchange_ranks > 0
        if network or exchange or name in _FIXED:
            fixed.append((name, then[name], now[name]))
    # A checkpoint has averages or it does not, and their decay may change. Only half floats have a loss scale.
    for name, value in (("training.ema", "None"), ("training.precision", "float16")):
        if value in (then[name], now[name]):
            fixed.append((name, then[name], now[name]))
    name = "optimizer.momentum"
    if now["optimizer.name"] == SGDConfig.default("name") and "0.0" in (then.get(name), now[name]):
        fixed.append((name, then.get(name, now[name]), now[name]))  # without momentum it has no variable, as LARS has
    differences = [f"{name} was {before}, is {after}" for name, before, after in fixed if before != after]
    if differences:
        raise ValueError(
            f"{checkpoint} is of another training: {'; '.join(differences)}. Set them as they were, or start a new run"
        )


def check_same_order(checkpoint: Location, state: TrainingState, order: str) -> None:
    """Check that the rest of a checkpoint's epoch is read in the same order as its first part.

    Raises:
        ValueError: The order differs. The error names both orders (see `TrainingInput.order`) and what to do.
    """
    if state.is_within_an_epoch and state.order != order:
        raise ValueError(
            f"{checkpoint} was written within an epoch of {state.order}, now it is {order}: set reader.name and "
            "reader.cache_limit_gib as they were"
        )
