"""A rank dies while gradients travel: no rank has applied a part of the means, whichever had arrived already."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.setup.recipe import make_mode

RATE, LOCAL = 0.1, "{name: local, every_steps: 1, outer: {momentum: 0.5}}"


class BreaksOff:
    """Two ranks, of which the other one dies in a chosen collective operation of a step."""

    rank, size = 0, 2

    def __init__(self, model: keras.Model) -> None:
        self.calls, self.dies_in = 0, tf.Variable(-1)
        self.elements = [int(np.prod(each.shape)) for each in model.trainable_variables]

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


OPTIMIZERS = ["{name: sgd, momentum: 0.9}", "lars", "lamb", "adamw"]
SHARDED = "{name: synchronous, shard_optimizer: true}"


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [
        *((mode, optimizer) for mode in ("synchronous", SHARDED) for optimizer in OPTIMIZERS),
        *((mode, optimizer) for mode in ("delayed", LOCAL) for optimizer in ("lamb", "{name: sgd, momentum: 0.9}")),
    ],
)
def test_nothing_is_applied_of_an_exchange_that_broke_off(
    mode: str,
    optimizer: str,
    tiny_model: keras.Model,
    images: dict[str, np.ndarray],
    targets: np.ndarray,
) -> None:
    config = load("smoke", [f"training.mode={mode}", f"optimizer={optimizer}", "exchange.bucket_mib=1e-6"])
    weights = tiny_model.trainable_variables
    collective: Any = BreaksOff(tiny_model)
    stop = StopAgreement(collective, requested=lambda: False)

    chosen = make_mode(
        config,
        tiny_model,
        lambda truth, logits: tf.reduce_mean(tf.square(truth - logits), axis=1),
        collective,
        steps_per_epoch=4,
        stop=stop,
    )
    chosen.begin(0)
    adapt, step = chosen.optimizer, chosen.step
    adapt.learning_rate = RATE
    batch = ({name: tf.constant(each) for name, each in images.items()}, tf.constant(targets))
    for _ in range(2):  # the first one of `delayed` applies nothing
        step(*batch)

    # In local training a rank's weights and moments are its own; what all ranks have is what they start from.
    common = [*chosen.shared, *(chosen.between if mode == LOCAL else [*weights, *adapt.variables])]
    # The flags, the parts of the means, and whether these are finite. Later in the step a sharded optimizer has moved
    # its moments, but no weight.
    in_gradients = 1 + len(weights) + 1 if mode == SHARDED else collective.calls
    # Every variable travels by itself.
    assert collective.calls >= (in_gradients + len(weights) if mode == SHARDED else len(weights) + 1)
    for number in range(collective.calls):
        kept = common if number < in_gradients else weights
        before = [np.array(each) for each in kept]
        collective.dies_in.assign(number)
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"the other rank died in operation {number}"):
            step(*batch)
        np.testing.assert_equal([np.array(each) for each in kept], before, err_msg=f"operation {number}")
    collective.dies_in.assign(-1)
    moving = weights if mode == SHARDED else common
    before = [np.array(each) for each in moving]
    step(*batch)
    moved = [not np.array_equal(np.array(each), was) for each, was in zip(moving, before, strict=True)]
    assert all(moved) if mode == SHARDED else any(moved)
