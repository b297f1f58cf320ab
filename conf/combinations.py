"""Training modes and the settings of other sections that go together."""

from typing import Any

from conf.sections.dataset import ReaderConfig
from conf.sections.exchange import ExchangeConfig
from conf.sections.launch import LaunchConfig
from conf.sections.modes import ModeConfig
from conf.sections.section import Member, Section
from conf.sections.training import TrainingConfig


def check_mode(chosen: ModeConfig, launch: LaunchConfig, config: Section) -> None:
    """Check that all other settings fit the training mode.

    Args:
        chosen: The mode.
        launch: How many workers train.
        config: The whole configuration; the mode's declaration names the keys to check.

    Raises:
        ValueError: A setting does not fit the mode. The message names it, the reason and the remedy.
    """
    mode, workers = chosen.declaration, launch.num_workers
    if workers % mode.ranks_per_copy:
        raise ValueError(
            f"launch.num_workers={workers} does not divide into copies of the model of {mode.ranks_per_copy} workers "
            f"each, as training.mode={chosen.name} has them: set a multiple of {mode.ranks_per_copy}"
        )
    for key, allowed, reason, remedy in mode.refusals():
        value = choice_at(config, key)
        if value is not None and value != [] and value not in allowed:
            is_long = isinstance(value, list) and isinstance(value[0], Section)
            raise ValueError(f"{key if is_long else f'{key}={value}'} {reason}: {remedy}")
    ranks = value_at(config, "model.batch_norm_ranks")
    if mode.ranks_per_copy > 1 and ranks != 1:
        raise ValueError(
            f"model.batch_norm_ranks={ranks} makes groups of workers, and training.mode={chosen.name} makes those that "
            "hold one copy of the model: set model.batch_norm_ranks=1"
        )
    if launch.recover == "in_place" and mode.not_in_place:
        raise ValueError(f"launch.recover=in_place {mode.not_in_place}: set launch.recover=restart, and launch.retries")


def value_at(config: Section, key: str) -> Any:
    """Return the value of a key; None: the chosen sections have no such key."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def choice_at(config: Section, key: str) -> Any:
    """Return the value of a key, or the name of the section that the key chooses."""
    value = value_at(config, key)
    return value.name if isinstance(value, Member) else value


def check_length(training: TrainingConfig, exchange: ExchangeConfig, steps_per_epoch: int) -> str | None:
    """Check that the training mode has an effect in a run of this length.

    Args:
        training: The epochs and their mode.
        exchange: The codec and its warm-up.
        steps_per_epoch: Optimizer steps per epoch on the dataset.

    Returns:
        A warning; None: there is no problem.

    Raises:
        ValueError: The run ends before the mode or the codec begins.
    """
    mode, epochs = training.mode.declaration, training.epochs
    steps, beginning = epochs * steps_per_epoch, mode.beginning()
    if beginning is not None and beginning.steps >= steps:
        raise ValueError(
            f"{beginning.key}={beginning.steps} is not before the end of the run, which has {steps} steps, so that "
            f"{beginning.meaning}: lower it, or set training.mode=synchronous"
        )
    exchanges, wanted = mode.exchanges(epochs, steps_per_epoch), mode.wanted_exchanges()
    if exchanges is None:
        _check_warmup_ends(exchange, steps, "steps")
        return None
    _check_warmup_ends(exchange, exchanges, "exchanges")
    if wanted is None or exchanges >= wanted[1]:
        return None
    return (
        f"{wanted[0]} wants about {wanted[1]} exchanges, and this run has {exchanges}: lower it or have workers "
        f"exchange more often, or train longer"
    )


def _check_warmup_ends(exchange: ExchangeConfig, number: int, unit: str) -> None:
    if exchange.codec.name != "none" and exchange.warmup_steps >= number:
        raise ValueError(
            f"exchange.warmup_steps={exchange.warmup_steps} is not before the end of the run, which has {number} "
            f"{unit}, so that exchange.codec={exchange.codec.name} never begins: lower it, train longer, or set "
            "exchange.codec=none"
        )
    for name in ("density", "rank"):
        key = f"exchange.codec.{name}_schedule"
        bounds = [entry.before_step for entry in getattr(exchange.codec, f"{name}_schedule", [])]
        if bounds and bounds[-1] >= number:
            raise ValueError(
                f"{key} ends with before_step={bounds[-1]}, which is not before the end of the run of {number} {unit}, "
                f"so that exchange.codec.{name}={getattr(exchange.codec, name)} never holds: lower it, or train longer"
            )
        if bounds and bounds[0] <= exchange.warmup_steps:
            raise ValueError(
                f"{key} begins with before_step={bounds[0]}, and until exchange.warmup_steps={exchange.warmup_steps} "
                "gradients travel in float32: raise the one or lower the other"
            )


def check_recovery(launch: LaunchConfig, training: TrainingConfig, reader: ReaderConfig) -> None:
    """Check that training can continue in place after a worker's process has died.

    Raises:
        ValueError: Training cannot continue in place. The message says why and what to do.
    """
    if launch.recover != "in_place":
        return
    if launch.num_workers == 1:
        raise ValueError(
            "launch.recover=in_place continues with the other workers, and launch.num_workers=1 has none: set "
            "launch.recover=restart, and launch.retries"
        )
    if training.trace_steps is not None:
        raise ValueError(
            "training.trace_steps brings the clocks of processes together, and launch.recover=in_place may replace one "
            "of them: set launch.recover=restart"
        )
    if reader.name == "petastorm":
        raise ValueError(
            "launch.recover=in_place continues within an epoch, and reader.name=petastorm begins epochs only at their "
            "start: set reader.name=groundswell"
        )
