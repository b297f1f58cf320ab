"""The modes of `declared_modes` as a rank makes them."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from models.compression.codecs.none import NoneCodec
from pipelines.training.modes.synchronous import Synchronous
from pipelines.training.modes.whole_networks import WholeNetworks
from pipelines.training.step.loop import average_statistics
from pipelines.training.step.mode import ModeInputs
from pipelines.training.step.rule import Apply
from pipelines.training.step.step import make_apply, make_gradients


def moments_of(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """What ranks that train alone have of their own."""
    counted = {id(optimizer.iterations), id(optimizer._learning_rate)}
    return [variable for variable in optimizer.variables if id(variable) not in counted]


class Means:
    """A `Rule`: an update by own gradients, and the mean of the weights where it is due."""

    def __init__(self, inputs: ModeInputs, optimizer: keras.optimizers.Optimizer, every_steps: int) -> None:
        self.inputs, self.optimizer, self.every = inputs, optimizer, every_steps
        self.shared: Sequence[keras.Variable] = ()
        self.own, self.between = moments_of(optimizer), ()

    def begin(self, step: int) -> None: ...

    def block(self, step: int) -> int:
        epoch = self.inputs.steps_per_epoch
        return max(step // self.every * self.every, step // epoch * epoch)

    def begin_step(self) -> None: ...

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def update(self, gradients: Sequence[tf.Tensor], apply: Apply) -> None:
        steps, weights = self.optimizer.iterations.value + 1, self.inputs.model.trainable_variables
        apply(gradients)

        def take_mean() -> bool:
            sums = self.inputs.collective.allreduce([variable.value for variable in weights])
            for variable, total in zip(weights, sums, strict=True):
                variable.assign(total / self.inputs.collective.size)
            return True

        tf.cond((steps % self.every == 0) | (steps % self.inputs.steps_per_epoch == 0), take_mean, lambda: False)


def make_averaging(inputs: ModeInputs, declaration: Any) -> WholeNetworks:
    optimizer, exchange = inputs.make_optimizer(), inputs.make_exchange(codec=NoneCodec())
    return WholeNetworks(inputs, optimizer, exchange, Means(inputs, optimizer, declaration.every_steps))


class HalvesOfBatches(WholeNetworks):
    """A `Mode` with a state of its own for each rank: how many halves it has computed."""

    def __init__(self, inputs: ModeInputs) -> None:
        optimizer, exchange = inputs.make_optimizer(), inputs.make_exchange()
        super().__init__(inputs, optimizer, exchange, Synchronous(optimizer, exchange, inputs.stop))
        self.count = keras.Variable(0, dtype="int64", trainable=False, name="halves")
        self.own, self._half = [self.count], inputs.collective.group.rank
        self._whole: Any = self.step
        self.step = self._take_half

    def _take_half(self, images: Any, targets: tf.Tensor, seeds: Any = None, size: Any = None) -> tf.Tensor:
        self.count.assign(self.count + 1 + self._half)
        mine = [tf.nest.map_structure(lambda each: each[self._half :: 2], part) for part in (images, targets, seeds)]
        return self._whole(*mine, size)

    def figures(self) -> dict[str, float]:
        return {"exchange/halves": float(self.count.value)}


def make_halves(inputs: ModeInputs, declaration: Any) -> HalvesOfBatches:
    return HalvesOfBatches(inputs)


class TrainsAlone:
    """A `Mode` that takes its own steps."""

    def __init__(self, inputs: ModeInputs) -> None:
        self.inputs, self.optimizer, self.exchange = inputs, inputs.make_optimizer(), inputs.make_exchange()
        self.exchange.build(inputs.model.trainable_variables)
        self.accumulate, self.shared, self.between = None, (), ()
        self.own = moments_of(self.optimizer)
        gradients = make_gradients(inputs.model, inputs.loss, jit_compile=False)
        apply = make_apply(self.optimizer, inputs.model.trainable_variables)

        @tf.function
        def step(images: Any, targets: tf.Tensor, seeds: Any = None, size: Any = None) -> tf.Tensor:
            loss, found = gradients(images, targets, seeds, size)
            apply(found)
            return loss

        self.step = step

    def begin(self, step: int) -> None: ...

    def block(self, step: int) -> int:
        return step // self.inputs.steps_per_epoch * self.inputs.steps_per_epoch

    def come_together(self) -> None:
        weights = self.inputs.model.trainable_variables
        sums = self.inputs.collective.allreduce([variable.value for variable in weights])
        for variable, total in zip(weights, sums, strict=True):
            variable.assign(total / self.inputs.collective.size)
        average_statistics(self.inputs.model, self.inputs.collective)

    def figures(self) -> dict[str, float]:
        return {}

    def payload_bytes(self) -> int:
        return 0

    def reset(self) -> None: ...


def make_alone(inputs: ModeInputs, declaration: Any) -> TrainsAlone:
    return TrainsAlone(inputs)
