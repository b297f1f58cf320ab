"""Local steps: what a checkpoint of an earlier configuration leaves as it was."""

from typing import Any

import keras
import pytest

from conf.load import load
from pipelines.training.modes.local import LocalUpdates
from pipelines.training.setup.recipe import make_exchange


def local_updates(one_rank: Any, rate: float) -> LocalUpdates:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    return LocalUpdates(
        model,
        optimizer,
        make_exchange(load("smoke"), one_rank),
        None,
        steps_per_epoch=4,
        every_steps=2,
        local_after_steps=0,
        rate=rate,
        momentum=0.9,
        nesterov=True,
    )


def test_a_resumed_run_takes_the_outer_rate_that_is_set_now(one_rank: Any) -> None:
    before, after = local_updates(one_rank, 1.0), local_updates(one_rank, 0.7)
    for old, new in zip(before.shared, after.shared, strict=True):  # as from a checkpoint
        new.assign(old)
    after.begin(0)
    (rate,) = [variable for variable in after.shared if variable.name == "learning_rate"]
    assert float(rate.numpy()) == pytest.approx(0.7)
