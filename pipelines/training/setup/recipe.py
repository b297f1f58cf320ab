"""The parts of one training made from the configuration: model, loss, metrics, optimizer, exchange and mode."""

import functools
from collections.abc import Mapping, Sequence

import keras

from conf.schema import RunConfig
from conf.sections.codecs import CodecConfig
from conf.sections.optimizers import OneBitAdamConfig, OptimizerConfig
from conf.sections.training import ImportedLossConfig, MetricConfig, TrainingConfig, WarmStartConfig
from models.compression.arithmetic.graph import Marks
from models.compression.codec import Codec
from models.compression.codecs.table import CODECS
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.wire import Collective
from models.layers.preprocessing import InputGroup
from models.layers.table import AUGMENTATIONS
from models.losses import Loss, classification_loss, imported_loss
from models.metrics import Metric, imported_metric
from models.networks.model import build_model
from models.networks.warm_start import freeze, rate_factors
from models.optimizers.layerwise import variables_with_roles
from models.optimizers.sharded import ShardedOptimizer, Shards
from models.optimizers.table import OPTIMIZERS
from pipelines.dataset.format.manifest import Manifest
from pipelines.training.modes.table import mode_maker
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.setup.bands import band_channels, used_groups
from pipelines.training.setup.class_weights import class_weights
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.mode import Mode, ModeInputs
from pipelines.training.step.step import StepClocks
from pipelines.training.step.weight_average import WeightAverage


def make_model(config: RunConfig, manifest: Manifest) -> keras.Model:
    """Build the configured network for the image groups and classes of the dataset."""
    return build_model(
        input_groups(manifest, config.input.bands),
        network=config.model.name,
        classes=len(manifest.class_names),
        upsampling=config.input.upsampling,
        augmentation=AUGMENTATIONS[config.input.augmentation.name](**config.input.augmentation.arguments()),
        precision=config.training.precision,
        resizes=bool(config.input.resolution_schedule),
        **config.model.arguments(),
    )


def freeze_layers(config: WarmStartConfig, model: keras.Model) -> list[str]:
    """Freeze the configured layers and return their names.

    Raises:
        ValueError: A layer does not exist, or no trainable layer is left.
    """
    try:
        return freeze(model, config.frozen_layers)
    except ValueError as error:
        raise ValueError(f"warm_start.frozen_layers: {error}") from None


def make_rate_factors(config: WarmStartConfig, model: keras.Model) -> list[tuple[keras.Variable, float]]:
    """Return the variables whose learning rate has a factor, each with its factor.

    Raises:
        ValueError: A layer or variable does not exist or is frozen.
    """
    try:
        return rate_factors(model, config.rate_factors)
    except ValueError as error:
        raise ValueError(f"warm_start.rate_factors: {error}") from None


def input_groups(manifest: Manifest, bands: Sequence[str] | None) -> list[InputGroup]:
    """Return the image groups that the network sees, with the statistics of the training split, for preprocessing.

    Args:
        manifest: Manifest of the dataset.
        bands: Names of the network's bands, in its order; None: all.

    Raises:
        ValueError: The dataset does not have one of the bands.
    """
    channels = band_channels(manifest.groups, bands)
    return [
        InputGroup(
            name=group.name,
            shape=group.shape,
            dtype=group.dtype,
            mean=manifest.statistics[group.name].mean,
            std=manifest.statistics[group.name].std,
            channels=channels[group.name],
        )
        for group in used_groups(manifest.groups, bands)
    ]


def make_optimizer(
    config: OptimizerConfig,
    model: keras.Model,
    *,
    gradient_clipping: float | None = None,
    shards: Shards | None = None,
) -> keras.optimizers.Optimizer:
    """Build the configured optimizer; the loop sets its learning rate before every step.

    Args:
        config: The optimizer's section.
        model: The model whose trainable variables are updated.
        gradient_clipping: Global norm to which the optimizer scales its gradients, before it adds its own decay; None:
            gradients do not change.
        shards: Shards that divide the optimizer among the ranks, such as `ShardExchange`; None: every rank has all of
            it.
    """
    chosen = {argument: variables_with_roles(model, roles) for argument, roles in config.roles().items()}
    optimizer = OPTIMIZERS[config.name](**chosen, **config.arguments())
    optimizer.global_clipnorm = gradient_clipping
    if shards is not None:
        return ShardedOptimizer(optimizer, model.trainable_variables, shards)
    optimizer.build(model.trainable_variables)
    return optimizer


def copy_optimizer(
    config: OptimizerConfig, warm_start: WarmStartConfig, model: keras.Model, copies: Mapping[int, keras.Variable]
) -> tuple[keras.optimizers.Optimizer, list[tuple[keras.Variable, float]]]:
    """Build the configured optimizer for copies of some of the model's trainable variables.

    Args:
        config: The optimizer's section.
        warm_start: The section with the factors of learning rates.
        model: The model.
        copies: The copies by the `id` of the variable.

    Returns:
        The optimizer, and the copies whose learning rate has a factor, with their factors.
    """
    chosen = {
        argument: [copies[id(each)] for each in variables_with_roles(model, roles) if id(each) in copies]
        for argument, roles in config.roles().items()
    }
    optimizer = OPTIMIZERS[config.name](**chosen, **config.arguments())
    optimizer.build(list(copies.values()))
    factors = make_rate_factors(warm_start, model)
    return optimizer, [(copies[id(each)], factor) for each, factor in factors if id(each) in copies]


def make_exchange(config: RunConfig, collective: Collective, codec: Codec | None = None) -> GradientExchange:
    """Build the exchange from a collective, with the configured codec or another one."""
    chosen = codec or make_codec(config.exchange.codec, config.optimizer)
    return GradientExchange(chosen, collective, seed=config.training.seed, **config.exchange.arguments())


def make_codec(config: CodecConfig, optimizer: OptimizerConfig) -> Codec:
    """Build the configured codec; a codec that belongs to an optimizer's method gets the optimizer's settings."""
    shared = {"beta_1": optimizer.beta_1} if isinstance(optimizer, OneBitAdamConfig) else {}
    return CODECS[config.name](**config.arguments(), **shared)


def make_loss(training: TrainingConfig, manifest: Manifest) -> Loss:
    """Return the per-sample loss of training.

    Raises:
        ValueError: The import path of the loss is not found, or class weights do not fit the dataset.
    """
    if isinstance(training.loss, ImportedLossConfig):
        return imported_loss(training.loss.path, training.loss.settings, setting="training.loss.path")
    return classification_loss(
        manifest.task,
        label_smoothing=training.label_smoothing,
        class_weights=class_weights(training.class_weights, manifest),
    )


def make_metrics(config: Mapping[str, MetricConfig]) -> dict[str, Metric]:
    """Return the metrics of `training.metrics` by name.

    Raises:
        ValueError: A metric is not found.
    """
    return {
        name: imported_metric(metric.path, metric.settings, setting=f"training.metrics.{name}.path")
        for name, metric in config.items()
    }


def make_mode(
    config: RunConfig,
    model: keras.Model,
    loss: Loss,
    collective: HorovodCollective,
    *,
    steps_per_epoch: int,
    micro_batches: int = 1,
    marks: Marks | None = None,
    stop: StopAgreement | None = None,
    loss_scale: LossScale | None = None,
    average: WeightAverage | None = None,
    clocks: StepClocks | None = None,
) -> Mode:
    """Make the configured training mode, with its optimizer, exchange and step; every rank makes the same call.

    Args:
        config: The whole configuration.
        model: The model that is trained.
        loss: Per-sample losses `(batch,)` from targets and logits.
        collective: The ranks, in groups that hold one copy of the model each.
        steps_per_epoch: Number of optimizer steps per epoch.
        micro_batches: Number of this rank's batches per step.
        marks: Receive the times of the parts of each step; None: times are not measured.
        stop: See `ModeInputs`.
        loss_scale: See `ModeInputs`.
        average: See `ModeInputs`.
        clocks: See `ModeInputs`.
    """

    def exchange(collective: Collective = collective, codec: Codec | None = None) -> GradientExchange:
        made = make_exchange(config, collective, codec)
        made.marks = marks
        return made

    def optimizer(shards: Shards | None = None) -> keras.optimizers.Optimizer:
        return make_optimizer(
            config.optimizer, model, gradient_clipping=config.training.gradient_clipping, shards=shards
        )

    inputs = ModeInputs(
        collective=collective,
        model=model,
        loss=loss,
        micro_batches=micro_batches,
        batch_size=config.training.batch_size_per_worker,
        steps_per_epoch=steps_per_epoch,
        jit_compile=config.training.jit_compile,
        rate_factors=make_rate_factors(config.warm_start, model),
        make_exchange=exchange,
        make_codec=functools.partial(make_codec, config.exchange.codec, config.optimizer),
        make_optimizer=optimizer,
        copy_optimizer=functools.partial(copy_optimizer, config.optimizer, config.warm_start, model),
        stop=stop,
        loss_scale=loss_scale,
        average=average,
        clocks=clocks,
    )
    return mode_maker(config.training.mode)(inputs, config.training.mode.declaration)
