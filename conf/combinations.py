"""Training modes and the settings of other sections that go together."""

import math
from typing import TYPE_CHECKING

from conf.modes import DelayedConfig, LocalConfig, ParameterServerConfig, PipelineConfig, shards_optimizer

if TYPE_CHECKING:
    from conf.schema import RunConfig

_UPDATES_PER_AVERAGE = 10
PUSHED_CODECS = ("none", "onebit", "topk")
"""Codecs whose first message holds all that a worker says, for the training mode `parameter_server`."""


def check_mode(config: "RunConfig") -> None:
    """Check that everything else fits the training mode.

    Raises:
        ValueError: Names both settings, and says why they do not go together and what to do.
    """
    if isinstance(config.training.mode, LocalConfig):
        _check_local(config, config.training.mode)
    if isinstance(config.training.mode, DelayedConfig):
        _check_delayed(config)
    if shards_optimizer(config.training.mode):
        _check_shards(config)
    if isinstance(config.training.mode, PipelineConfig):
        _check_pipeline(config, config.training.mode)
    if isinstance(config.training.mode, ParameterServerConfig):
        _check_server(config, config.training.mode)


def check_length(config: "RunConfig", steps_per_epoch: int) -> str | None:
    """Check that the training mode can do what it is for in a run of this length.

    Args:
        config: The whole configuration.
        steps_per_epoch: Optimizer steps per epoch on the dataset.

    Returns:
        A warning; None: all is well.

    Raises:
        ValueError: The mode or the codec never begins.
    """
    mode, steps = config.training.mode, config.training.epochs * steps_per_epoch
    if isinstance(mode, ParameterServerConfig) and mode.synchrony != "backup" and mode.synchronous_steps >= steps:
        raise ValueError(
            f"training.mode.synchronous_steps={mode.synchronous_steps} is not before the end of the run, which has "
            f"{steps} steps, so that workers always wait for each other: lower it, or set training.mode=synchronous"
        )
    if isinstance(mode, LocalConfig) and mode.local_after_steps >= steps:
        raise ValueError(
            f"training.mode.local_after_steps={mode.local_after_steps} is not before the end of the run, which has "
            f"{steps} steps, so that workers never train alone: lower it, or set training.mode=synchronous"
        )
    _check_warmup_ends(config, steps_per_epoch)
    if not isinstance(mode, LocalConfig):
        return None
    exchanges = _exchanges(config, mode, steps_per_epoch)
    # Momentum m averages about the last 1 / (1 - m) updates; a run that has only a few times as many does not get far.
    needed = round(_UPDATES_PER_AVERAGE / (1 - mode.outer.momentum))
    if not mode.outer.momentum or exchanges >= needed:
        return None
    return (
        f"training.mode.outer.momentum={mode.outer.momentum:g} wants about {needed} exchanges, and this run has "
        f"{exchanges}: lower it or training.mode.every_steps, or train longer"
    )


def _exchanges(config: "RunConfig", mode: LocalConfig, steps_per_epoch: int) -> int:
    """About how many times the workers average their weights."""
    each = math.ceil(steps_per_epoch / mode.every_steps)
    return math.ceil((config.training.epochs * steps_per_epoch - mode.local_after_steps) / steps_per_epoch * each)


def _check_warmup_ends(config: "RunConfig", steps_per_epoch: int) -> None:
    mode, exchange = config.training.mode, config.exchange
    number, unit = config.training.epochs * steps_per_epoch, "steps"
    if isinstance(mode, LocalConfig):
        number, unit = _exchanges(config, mode, steps_per_epoch), "exchanges"
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


def check_recovery(config: "RunConfig") -> None:
    """Check that training can continue in place where a worker's process dies.

    Raises:
        ValueError: It cannot; says why and what to do.
    """
    if config.launch.recover != "in_place":
        return
    if config.launch.num_workers == 1:
        raise ValueError(
            "launch.recover=in_place continues with the other workers, and launch.num_workers=1 has none: set "
            "launch.recover=restart, and launch.retries"
        )
    if config.training.trace_steps is not None:
        raise ValueError(
            "training.trace_steps brings the clocks of processes together, and launch.recover=in_place may replace one "
            "of them: set launch.recover=restart"
        )
    if config.reader.name == "petastorm":
        raise ValueError(
            "launch.recover=in_place continues within an epoch, and reader.name=petastorm begins epochs only at their "
            "start: set reader.name=groundswell"
        )


def _check_local(config: "RunConfig", mode: LocalConfig) -> None:
    training, codec = config.training, config.exchange.codec.name
    if codec in ("dgc", "onebit_adam"):
        raise ValueError(
            f"exchange.codec={codec} keeps the momentum of the gradients of every step, and training.mode=local "
            "exchanges no gradients: choose another exchange.codec, or training.mode=synchronous"
        )
    if training.precision == "float16":
        raise ValueError(
            "training.precision=float16 has a loss scale on which all workers agree in every step, and "
            "training.mode=local exchanges nothing in most steps: set training.precision=bfloat16 or float32"
        )
    if training.ema is not None:
        raise ValueError(
            f"training.ema={training.ema} averages the weights after every step, and with training.mode=local they "
            "differ between workers: set training.ema=null"
        )
    if config.model.batch_norm_ranks != 1:
        raise ValueError(
            f"model.batch_norm_ranks={config.model.batch_norm_ranks} exchanges statistics in every step, and "
            "training.mode=local exchanges nothing in most steps: set model.batch_norm_ranks=1"
        )
    every = training.checkpoint_every_steps
    if every is not None and every % mode.every_steps:
        raise ValueError(
            f"training.checkpoint_every_steps={every} is no multiple of training.mode.every_steps={mode.every_steps}, "
            "and between two exchanges every worker has other weights: set a multiple"
        )


def _check_delayed(config: "RunConfig") -> None:
    codec = config.exchange.codec.name
    if codec in ("dgc", "onebit_adam"):
        raise ValueError(
            f"exchange.codec={codec} has a momentum of its own for the weights that gave the gradient, and "
            "training.mode=delayed applies it one step later: choose another exchange.codec, or "
            "training.mode=synchronous"
        )
    if config.training.precision == "float16":
        raise ValueError(
            "training.precision=float16 skips the step whose gradients overflow, and with training.mode=delayed these "
            "have travelled before the step is taken: set training.precision=bfloat16 or float32"
        )


def _check_shards(config: "RunConfig") -> None:
    codec = config.exchange.codec.name
    if codec != "none":
        raise ValueError(
            f"exchange.codec={codec} gives every worker all of the mean gradient, and training.mode.shard_optimizer="
            "true gives each one its part, in float32: set exchange.codec=none or training.mode=synchronous"
        )


def _check_pipeline(config: "RunConfig", mode: PipelineConfig) -> None:
    training, workers = config.training, config.launch.num_workers
    if workers % mode.stages:
        raise ValueError(
            f"launch.num_workers={workers} does not divide into pipelines of training.mode.stages={mode.stages} "
            f"workers: set a multiple of {mode.stages}"
        )
    if config.exchange.codec.name != "none":
        raise ValueError(
            f"exchange.codec={config.exchange.codec.name} keeps what is left to send by worker, and with "
            "training.mode=pipeline workers hold different stages: set exchange.codec=none"
        )
    if config.reader.name == "petastorm":
        raise ValueError(
            "reader.name=petastorm gives samples in an order that depends on its threads, and with "
            "training.mode=pipeline one worker reads the images and another one their labels: set "
            "reader.name=groundswell"
        )
    if training.precision == "float16":
        raise ValueError(
            "training.precision=float16 skips the step whose gradients overflow on any worker, and with "
            "training.mode=pipeline each stage updates alone: set training.precision=bfloat16 or float32"
        )
    if training.gradient_clipping is not None:
        raise ValueError(
            f"training.gradient_clipping={training.gradient_clipping} is for the norm over all layers, and with "
            "training.mode=pipeline no worker has all gradients: set training.gradient_clipping=null"
        )
    if training.ema is not None:
        raise ValueError(
            f"training.ema={training.ema} averages the weights of the whole network after every step, and with "
            "training.mode=pipeline each worker has those of its stage: set training.ema=null"
        )
    if config.model.batch_norm_ranks != 1:
        raise ValueError(
            f"model.batch_norm_ranks={config.model.batch_norm_ranks} sums over workers with the same layers, and with "
            "training.mode=pipeline consecutive workers hold different ones: set model.batch_norm_ranks=1"
        )
    if config.input.resolution_schedule:
        raise ValueError(
            "input.resolution_schedule changes the size of images, and with training.mode=pipeline the tensors between "
            "the stages have one size: set input.resolution_schedule=[]"
        )
    if training.trace_steps is not None:
        raise ValueError(
            f"training.trace_steps={training.trace_steps} records steps that are one graph, and with "
            "training.mode=pipeline each tick is one: set training.trace_steps=null"
        )
    if config.launch.recover == "in_place":
        raise ValueError(
            "launch.recover=in_place replaces one worker by a spare that computes as any other, and with "
            "training.mode=pipeline the others hold other stages: set launch.recover=restart, and launch.retries"
        )


def _check_server(config: "RunConfig", mode: ParameterServerConfig) -> None:
    training, workers, codec = config.training, config.launch.num_workers, config.exchange.codec.name
    if mode.synchrony == "backup" and mode.backup_workers >= workers:
        raise ValueError(
            f"training.mode.backup_workers={mode.backup_workers} of launch.num_workers={workers} leave no worker for a "
            "step to wait for: lower it"
        )
    if codec not in PUSHED_CODECS:
        raise ValueError(
            f"exchange.codec={codec} is for an exchange among all workers, and with training.mode=parameter_server "
            f"each pushes alone: set exchange.codec to one of {', '.join(PUSHED_CODECS)}"
        )
    if training.precision == "float16":
        raise ValueError(
            "training.precision=float16 skips the step whose gradients overflow on all workers, and with "
            "training.mode=parameter_server each worker steps alone: set training.precision=bfloat16 or float32"
        )
    if training.gradient_clipping is not None:
        raise ValueError(
            f"training.gradient_clipping={training.gradient_clipping} is for the norm over all layers, and with "
            "training.mode=parameter_server no shard has all gradients: set training.gradient_clipping=null"
        )
    if training.ema is not None:
        raise ValueError(
            f"training.ema={training.ema} averages the weights after every step, and with "
            "training.mode=parameter_server workers step at different times: set training.ema=null"
        )
    if config.model.batch_norm_ranks != 1:
        raise ValueError(
            f"model.batch_norm_ranks={config.model.batch_norm_ranks} exchanges statistics in every step, and with "
            "training.mode=parameter_server workers step at different times: set model.batch_norm_ranks=1"
        )
    if training.trace_steps is not None:
        raise ValueError(
            f"training.trace_steps={training.trace_steps} compares the same steps of all workers, and with "
            "training.mode=parameter_server they step at different times: set training.trace_steps=null"
        )
    if config.launch.recover == "in_place":
        raise ValueError(
            "launch.recover=in_place lets a spare continue from the state of a worker, and with "
            "training.mode=parameter_server its shard has changed since: set launch.recover=restart, and launch.retries"
        )
