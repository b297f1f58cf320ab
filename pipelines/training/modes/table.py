"""All training modes by name.

A new mode is one file in this folder and one line in the table below. To be configurable it also has a class of
settings, with a line in the union, in `conf/modes.py`.
"""

from collections.abc import Callable

import keras

from conf.modes import ModeConfig, ParameterServerConfig
from models.compression.codec import Codec
from models.compression.exchange.exchange import GradientExchange
from pipelines.training.modes.delayed import Delayed
from pipelines.training.modes.local import LocalUpdates
from pipelines.training.modes.mode import Mode
from pipelines.training.modes.own_shard import CopyOptimizer
from pipelines.training.modes.parameter_server import ParameterServer
from pipelines.training.modes.synchronous import Synchronous
from pipelines.training.stop import StopAgreement

MODES: dict[str, Callable[..., Mode]] = {
    "synchronous": lambda model, optimizer, exchange, stop, steps_per_epoch: Synchronous(optimizer, exchange, stop),
    "local": LocalUpdates,
    "delayed": Delayed,
    # Between the ranks that hold the same stage; what a step does within a pipeline is `pipeline.Pipeline`.
    "pipeline": lambda model, optimizer, exchange, stop, steps_per_epoch, stages: Synchronous(
        optimizer, exchange, stop
    ),
    # What a step does is `server_step.ServerStep`.
    "parameter_server": ParameterServer,
}
"""Constructors with model, optimizer, exchange, agreement to stop, steps of an epoch, and the mode's settings."""


def make_mode(
    config: ModeConfig,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    exchange: GradientExchange,
    stop: StopAgreement | None,
    *,
    steps_per_epoch: int,
    copy_optimizer: CopyOptimizer | None = None,
    codec: Codec | None = None,
) -> Mode:
    """Build the configured mode.

    Args:
        config: The mode's section.
        model: The model that is trained.
        optimizer: Its optimizer, built.
        exchange: The exchange between the ranks.
        stop: How the ranks agree to stop; None: they are not asked to.
        steps_per_epoch: Optimizer steps of one epoch.
        copy_optimizer: Makes the optimizer of a rank's shard, for a parameter server.
        codec: Compresses what a worker pushes, for a parameter server.
    """
    make, settings = MODES[config.name], config.arguments()
    if isinstance(config, ParameterServerConfig):
        settings |= {"copy_optimizer": copy_optimizer, "codec": codec}
    return make(model, optimizer, exchange, stop, steps_per_epoch=steps_per_epoch, **settings)
