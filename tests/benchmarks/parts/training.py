"""What benchmarks train: a network, samples of noise, and the steps of `groundswell train`."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from conf.schema import RunConfig
from conf.sections.codecs import ExchangeConfig
from conf.sections.networks import ResNetCifarConfig, ResNetConfig
from conf.sections.optimizers import LARSConfig, OptimizerConfig
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.wire import Collective
from models.layers.preprocessing import InputGroup
from models.losses import classification_loss
from models.networks.model import build_model
from pipelines.training.modes.synchronous import Synchronous
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.setup import recipe
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.mode import Mode
from pipelines.training.step.step import Step, make_train_step

MIB = 1 << 20
Batch = tuple[dict[str, tf.Tensor], tf.Tensor]


class Training(NamedTuple):
    """The pieces of a training on this rank."""

    model: keras.Model
    optimizer: keras.optimizers.Optimizer
    exchange: GradientExchange
    step: Step


class Alone:
    """A collective of one rank."""

    rank, size = 0, 1

    def allreduce(self, tensors, name=None):
        return tensors

    def alltoall(self, tensor, splits=None, name=None):
        return tensor

    def allgather(self, tensor, name=None):
        return tensor


def image_group(
    name: str, side: int, bands: int, dtype: str = "uint16", mean: float = 1000.0, std: float = 500.0
) -> InputGroup:
    """Images of `side` pixels on each side."""
    return InputGroup(name, (side, side, bands), dtype, (mean,) * bands, (std,) * bands)


def satellite_groups(side: int) -> list[InputGroup]:
    """The 12 bands of BigEarthNet; `side` pixels of those of 10 m, a number that 6 divides."""
    sizes = ((10, side, 4), (20, side // 2, 6), (60, side // 6, 2))
    return [image_group(f"bands_{metres}m", pixels, bands) for metres, pixels, bands in sizes]


def network(
    groups: Sequence[InputGroup], config: ResNetConfig | ResNetCifarConfig, classes: int, **settings: Any
) -> keras.Model:
    """A network without augmentation; `settings` are those of `build_model`, and of the network other than `config`."""
    chosen = {"upsampling": "nearest", "augmentation": None, **config.arguments(), **settings}
    return build_model(groups, network=config.name, classes=classes, **chosen)


def noise(groups: Sequence[InputGroup], samples: int, classes: int, seed: int = 0, below: int = 5000) -> Batch:
    """A batch of random stored integers, with random targets of several labels."""
    random = np.random.default_rng(seed)
    images = {
        group.name: tf.constant(random.integers(0, below, (samples, *group.shape), dtype=group.dtype))  # type: ignore[call-overload]
        for group in groups
    }
    return images, tf.constant(random.integers(0, 2, (samples, classes)).astype(np.float32))


def exchange_of(
    collective: Collective,
    codec: Mapping[str, Any] | None = None,
    optimizer: OptimizerConfig | None = None,
    **settings: Any,
) -> GradientExchange:
    """An exchange with the settings of the configuration's section.

    Args:
        collective: Of the ranks.
        codec: Its `name` and parameters; None: `none`.
        optimizer: What a codec that is half of a method belongs to; None: LARS.
        **settings: Of the section `exchange`.
    """
    config = ExchangeConfig.model_validate({"codec": codec or {"name": "none"}, **settings})
    made = recipe.make_codec(config.codec, optimizer or LARSConfig())
    return GradientExchange(made, collective, seed=0, **config.arguments())


def random_gradients(exchange: GradientExchange, shapes: Sequence[Sequence[int]], rank: int = 0) -> list[tf.Tensor]:
    """Gradients of a rank, for which the exchange is built."""
    exchange.build([tf.zeros(shape) for shape in shapes])
    return [tf.random.stateless_normal(shape, (rank, index)) for index, shape in enumerate(shapes)]


def lars_training(
    model: keras.Model,
    exchange: GradientExchange,
    task: str = "multi_label",
    *,
    accumulation: Accumulation | None = None,
) -> Training:
    """A training with LARS in lock step, at a rate that keeps the weights finite."""
    optimizer = recipe.make_optimizer(LARSConfig(), model)
    optimizer.learning_rate = 0.01
    loss = classification_loss(task)
    step = make_train_step(
        model, loss, optimizer, exchange, Synchronous(optimizer, exchange), jit_compile=False, accumulation=accumulation
    )
    return Training(model, optimizer, exchange, step)


def configured_training(
    config: RunConfig, model: keras.Model, collective: HorovodCollective, task: str, steps_per_epoch: int
) -> Mode:
    """The mode of a configuration, with its exchange and optimizer."""
    return recipe.make_mode(
        config,
        model,
        classification_loss(task),
        collective,
        steps_per_epoch=steps_per_epoch,
        stop=StopAgreement(collective, requested=lambda: False),
    )


def elements(model: keras.Model) -> int:
    """Number of elements of all weights that are trained."""
    return sum(math.prod(variable.shape) for variable in model.trainable_variables)


def timed(step: Any, *inputs: Any, steps: int) -> list[float]:
    """Seconds of each of some steps, which end when their loss is known."""
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        float(step(*inputs))
        seconds.append(time.perf_counter() - started)
    return seconds


def pin() -> None:
    """Keep this rank on a core of its own."""
    core = int(os.environ["HOROVOD_RANK"]) % (os.cpu_count() or 1)
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})
