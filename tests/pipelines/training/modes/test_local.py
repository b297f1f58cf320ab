"""Local steps: what a checkpoint of an earlier configuration leaves as it was."""

from typing import Any

import keras
import pytest

from conf.load import load
from pipelines.training.setup.recipe import make_mode


def local_mode(one_rank: Any, rate: float) -> Any:
    inputs = keras.Input((2,), name="a")
    model = keras.Model({"a": inputs}, keras.layers.Dense(1)(inputs))
    mode = f"training.mode={{name: local, every_steps: 2, outer: {{rate: {rate}, momentum: 0.9}}}}"
    config = load("smoke", [mode, "optimizer=sgd"])
    return make_mode(config, model, keras.losses.mean_squared_error, one_rank, steps_per_epoch=4)


def test_a_resumed_run_takes_the_outer_rate_that_is_set_now(one_rank: Any) -> None:
    before, after = local_mode(one_rank, 1.0), local_mode(one_rank, 0.7)
    for old, new in zip(before.shared, after.shared, strict=True):  # as from a checkpoint
        new.assign(old)
    after.begin(0)
    (rate,) = [variable for variable in after.shared if variable.name == "learning_rate"]
    assert float(rate.numpy()) == pytest.approx(0.7)
