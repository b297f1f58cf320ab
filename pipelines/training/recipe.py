"""From the configuration to the pieces of one training: model, optimizer, schedule, exchange."""

import keras

from conf.optimizers import OptimizerConfig
from conf.schema import RunConfig
from models.compression.codecs.table import CODECS
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.wire import Collective
from models.layers.preprocessing import InputGroup
from models.networks.resnet import build_model
from models.optimizers.lars import LARS, normalisation_and_bias_paths
from models.optimizers.onebit_adam import OneBitAdam
from models.schedules import Schedule, gradual_warmup, multi_step, scaled_learning_rate
from pipelines.dataset.manifest import Manifest


def make_model(config: RunConfig, manifest: Manifest) -> keras.Model:
    """The network that the configuration asks for, on the image groups and classes of the dataset."""
    return build_model(
        input_groups(manifest),
        classes=len(manifest.class_names),
        depth=config.model.depth,
        width_factor=config.model.width_factor,
        interpolation=config.model.upsampling,
        augmentation=config.model.augmentation,
    )


def input_groups(manifest: Manifest) -> list[InputGroup]:
    """Image groups with the statistics of the training split, for the preprocessing inside the model."""
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
    """The optimizer, built; its learning rate is set by the loop before every step."""
    excluded = normalisation_and_bias_paths(model)
    if config.name == "lars":
        optimizer: keras.optimizers.Optimizer = LARS(
            learning_rate=0.0,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            trust_coefficient=config.trust_coefficient,
            excluded=excluded,
        )
    elif config.name == "onebit_adam":
        optimizer = OneBitAdam(
            learning_rate=0.0,
            warmup_steps=config.warmup_steps,
            beta_1=config.beta_1,
            beta_2=config.beta_2,
            weight_decay=config.weight_decay or None,
        )
    else:
        # Keras applies its weight decay beside the momentum, not through it.
        optimizer = keras.optimizers.SGD(
            learning_rate=0.0,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay or None,
        )
    if config.name != "lars":
        optimizer.exclude_from_weight_decay(
            var_list=[variable for variable in model.trainable_variables if variable.path in excluded]
        )
    optimizer.build(model.trainable_variables)
    return optimizer


def make_schedule(config: RunConfig, steps_per_epoch: int) -> Schedule:
    """Learning rate by optimizer step, from step 0."""
    peak = scaled_learning_rate(
        config.optimizer.learning_rate_per_256, config.global_batch_size, config.optimizer.scaling
    )
    total_steps = config.training.epochs * steps_per_epoch
    # A run as long as the recipe or longer has the milestones where they are stated, a shorter one in proportion.
    span = max(config.training.epochs, config.schedule.recipe_epochs)
    milestones = [(milestone.epoch / span, milestone.factor) for milestone in config.schedule.milestones]
    return gradual_warmup(
        multi_step(peak, total_steps, milestones), round(config.schedule.warmup_epochs * steps_per_epoch)
    )


def make_exchange(config: RunConfig, collective: Collective) -> GradientExchange:
    """Codec and collective joined."""
    settings = config.exchange
    parameters = settings.codec.model_dump(exclude={"name"})
    if "stages" in parameters:
        parameters["stages"] = [tuple(stage.values()) for stage in parameters["stages"]]
    if settings.codec.name == "onebit_adam":
        parameters["beta_1"] = config.optimizer.beta_1
    return GradientExchange(
        CODECS[settings.codec.name](**parameters),
        collective,
        dense_below=settings.dense_below,
        bucket_mib=settings.bucket_mib,
        warmup_steps=settings.warmup_steps,
        rescale_residual=settings.rescale_residual,
        seed=config.training.seed,
    )
