"""A rank dies while gradients travel: no rank has applied a part of the means, whichever had arrived already."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from pipelines.training.modes.table import make_mode
from pipelines.training.recipe import make_exchange, make_optimizer, make_shards
from pipelines.training.step import make_train_step
from pipelines.training.stop import StopAgreement

RATE = 0.1
LOCAL = "{name: local, every_steps: 1, outer: {momentum: 0.5}}"


class BreaksOff:
    """Two ranks, of which the other one dies in a chosen collective operation of a step."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls = 0
        self.dies_in = tf.Variable(-1)
        self.elements: list[int] = []
        """Number of elements of each variable, for what gathers their parts."""

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        with tf.control_dependencies([self._lives()]):
            return [tensor * 2.0 for tensor in tensors]

    def reducescatter(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        with tf.control_dependencies([self._lives()]):
            return 2.0 * tensor[: (tensor.shape[0] + 1) // 2]

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """The other rank has as many elements, but where its part of a variable has one less."""
        assert name is not None
        variable = self.elements[::-1][int(name.removeprefix("weights_shard"))]
        with tf.control_dependencies([self._lives()]):
            return tf.concat([tensor, tensor], 0)[:variable]

    def _lives(self) -> tf.Operation:
        number = self.calls
        self.calls += 1
        return tf.debugging.Assert(tf.not_equal(self.dies_in, number), [f"the other rank died in operation {number}"])


@pytest.mark.parametrize("optimizer", ["{name: sgd, momentum: 0.9}", "lars", "lamb", "adamw"])
@pytest.mark.parametrize("mode", ["synchronous", "delayed", LOCAL])
def test_nothing_is_applied_of_an_exchange_that_broke_off(
    mode: str,
    optimizer: str,
    tiny_model: keras.Model,
    images: dict[str, np.ndarray],
    targets: np.ndarray,
) -> None:
    config = load("smoke", [f"training.mode={mode}", f"optimizer={optimizer}", "exchange.bucket_mib=1e-6"])
    collective: Any = BreaksOff()
    adapt, exchange = make_optimizer(config.optimizer, tiny_model), make_exchange(config, collective)
    stop = StopAgreement(collective, requested=lambda: False)
    rule = make_mode(config.training.mode, tiny_model, adapt, exchange, stop, steps_per_epoch=4)

    def loss(truth: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(truth - logits), axis=1)

    step = make_train_step(tiny_model, loss, adapt, exchange, jit_compile=False, mode=rule)
    rule.begin(0)
    adapt.learning_rate = RATE
    batch = ({name: tf.constant(each) for name, each in images.items()}, tf.constant(targets))
    for _ in range(2):  # the first one of `delayed` applies nothing
        step(*batch)

    # In local training a rank's weights and moments are its own; what all ranks have is what they start from.
    own = [*tiny_model.trainable_variables, *adapt.variables]
    common = [*rule.shared, *(rule.between if mode == LOCAL else own)]
    before = [np.array(each) for each in common]
    assert collective.calls > len(tiny_model.trainable_variables), "every variable travels by itself"
    for number in range(collective.calls):
        collective.dies_in.assign(number)
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"the other rank died in operation {number}"):
            step(*batch)
        for each, was in zip(common, before, strict=True):
            np.testing.assert_array_equal(np.array(each), was, err_msg=f"operation {number}: {each.name}")
    collective.dies_in.assign(-1)
    step(*batch)
    assert any(not np.array_equal(np.array(each), was) for each, was in zip(common, before, strict=True))


@pytest.mark.parametrize("optimizer", ["{name: sgd, momentum: 0.9}", "lars", "lamb", "adamw"])
def test_a_sharded_optimizer_applies_nothing_before_all_parts_have_arrived(
    optimizer: str,
    tiny_model: keras.Model,
    images: dict[str, np.ndarray],
    targets: np.ndarray,
) -> None:
    """Later in the step it has moved its moments, but no weight."""
    mode = "{name: synchronous, shard_optimizer: true}"
    config = load("smoke", [f"training.mode={mode}", f"optimizer={optimizer}", "exchange.bucket_mib=1e-6"])
    collective: Any = BreaksOff()
    collective.elements = [int(np.prod(each.shape)) for each in tiny_model.trainable_variables]
    exchange = make_exchange(config, collective)
    shards = make_shards(config, tiny_model, exchange, collective)
    adapt = make_optimizer(config.optimizer, tiny_model, shards=shards)
    stop = StopAgreement(collective, requested=lambda: False)
    rule = make_mode(config.training.mode, tiny_model, adapt, exchange, stop, steps_per_epoch=4)

    def loss(truth: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(truth - logits), axis=1)

    step = make_train_step(tiny_model, loss, adapt, exchange, jit_compile=False, mode=rule)
    adapt.learning_rate = RATE
    batch = ({name: tf.constant(each) for name, each in images.items()}, tf.constant(targets))
    step(*batch)
    weights, variables = tiny_model.trainable_variables, len(tiny_model.trainable_variables)
    in_gradients = 1 + variables + 1  # the flags, the parts of the means, and whether these are finite
    assert collective.calls >= in_gradients + variables
    for number in range(collective.calls):
        kept = [*weights, *(adapt.variables if number < in_gradients else [])]
        before = [np.array(each) for each in kept]
        collective.dies_in.assign(number)
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"the other rank died in operation {number}"):
            step(*batch)
        for each, was in zip(kept, before, strict=True):
            np.testing.assert_array_equal(np.array(each), was, err_msg=f"operation {number}: {each.name}")
    collective.dies_in.assign(-1)
    before = [np.array(each) for each in weights]
    step(*batch)
    assert all(not np.array_equal(np.array(each), was) for each, was in zip(weights, before, strict=True))
