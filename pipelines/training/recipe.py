"""From the configuration to the pieces of one training: model, optimizer, exchange; `rates` has the schedule."""

import keras

from conf.codecs import CodecConfig
from conf.optimizers import OneBitAdamConfig, OptimizerConfig
from conf.schema import RunConfig
from models.compression.codec import Codec
from models.compression.codecs.table import CODECS
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.wire import Collective
from models.layers.preprocessing import InputGroup
from models.networks.model import build_model
from models.optimizers.roles import variables_with_roles
from models.optimizers.table import OPTIMIZERS
from pipelines.dataset.manifest import Manifest
from pipelines.training.rates import make_schedule

__all__ = ["input_groups", "make_codec", "make_exchange", "make_model", "make_optimizer", "make_schedule"]


def make_model(config: RunConfig, manifest: Manifest) -> keras.Model:
    """Build the configured network for the image groups and classes of the dataset."""
    return build_model(
        input_groups(manifest),
        network=config.model.name,
        classes=len(manifest.class_names),
        precision=config.training.precision,
        **config.model.arguments(),
    )


def input_groups(manifest: Manifest) -> list[InputGroup]:
    """Return the image groups with the statistics of the training split, for the preprocessing inside the model."""
    return [
        InputGroup(
            name=group.name,
            shape=group.shape,
            dtype=group.dtype,
            mean=manifest.statistics[group.name].mean,
            std=manifest.statistics[group.name].std,
        )
        for group in manifest.groups
    ]


def make_optimizer(config: OptimizerConfig, model: keras.Model) -> keras.optimizers.Optimizer:
    """Build the configured optimizer; the loop sets its learning rate before every step."""
    chosen = {argument: variables_with_roles(model, roles) for argument, roles in config.roles().items()}
    optimizer = OPTIMIZERS[config.name](**chosen, **config.arguments())
    optimizer.build(model.trainable_variables)
    return optimizer


def make_exchange(config: RunConfig, collective: Collective) -> GradientExchange:
    """Build the exchange from the configured codec and a collective."""
    codec = make_codec(config.exchange.codec, config.optimizer)
    return GradientExchange(codec, collective, seed=config.training.seed, **config.exchange.arguments())


def make_codec(config: CodecConfig, optimizer: OptimizerConfig) -> Codec:
    """Build the configured codec; the optimizer's settings are for a codec that is the other half of a method."""
    shared = {"beta_1": optimizer.beta_1} if isinstance(optimizer, OneBitAdamConfig) else {}
    return CODECS[config.name](**config.arguments(), **shared)
