"""The parts of a step in every kind of step, on one rank."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from models.compression.arithmetic.graph import Marks
from pipelines.training.setup.recipe import make_mode
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.step import StepClocks, StepFigures

IMAGES = {"image": np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16)}
TARGETS = np.eye(8, 16, dtype=np.float32)


def take_steps(
    one_rank: Any, marks: Marks | None, codec: str, mode: str, *, jit_compile: bool, scale: LossScale | None
) -> tuple[list[np.ndarray], StepClocks]:
    """Two steps from the same weights; the weights, and the clocks."""
    keras.utils.set_random_seed(0)
    image = keras.Input((16,), name="image")
    model = keras.Model({"image": image}, keras.layers.Dense(16)(keras.layers.Dense(128)(image)))
    settings = [f"training.mode={mode}", f"exchange.codec={codec}", f"training.jit_compile={str(jit_compile).lower()}"]
    config, clocks, loss = load("smoke", [*settings, "optimizer=sgd"]), StepClocks(), keras.losses.mean_squared_error
    made = make_mode(config, model, loss, one_rank, steps_per_epoch=2, marks=marks, loss_scale=scale, clocks=clocks)
    made.optimizer.learning_rate = 0.1
    made.begin(0)
    for _ in range(2):
        if marks is not None:
            marks.clear()
        made.step({"image": tf.constant(IMAGES["image"])}, tf.constant(TARGETS))
    return [variable.numpy() for variable in model.trainable_variables], clocks


@pytest.mark.parametrize(
    ("codec", "mode", "jit_compile", "half"),
    [
        ("none", "synchronous", False, False),
        ("onebit", "synchronous", False, False),
        ("onebit", "synchronous", True, False),
        ("none", "synchronous", False, True),
        ("onebit", "delayed", False, False),
        ("onebit", "{name: local, every_steps: 2}", False, False),
    ],
)
def test_a_marked_step_computes_the_same_and_has_all_its_parts(
    codec: str, mode: str, jit_compile: bool, half: bool, one_rank: Any
) -> None:
    marks = Marks()
    (marked, clocks), (plain, _) = (
        take_steps(one_rank, each, codec, mode, jit_compile=jit_compile, scale=LossScale() if half else None)
        for each in (marks, None)
    )
    np.testing.assert_equal(marked, plain)

    parts = marks.read()
    assert {mark.phase for mark, _, _ in parts} == {"compute", "wire", "optimizer"} | (
        {"encode", "decode"} if codec != "none" else set()
    )
    assert all(start <= end for _, start, end in parts)
    passes = {mark.name for mark, _, _ in parts if mark.phase == "compute"}
    # XLA computes both passes together.
    assert passes == ({"forward and backward pass"} if jit_compile else {"forward pass", "backward pass"})
    sent = {name for mark, _, _ in parts if mark.phase == "wire" for name in mark.tensors}
    assert any(name.endswith("kernel") for name in sent)
    figures = StepFigures.from_row(clocks.figures.numpy())
    assert (figures.exchange.payload_bytes > 0, figures.after_gradients_seconds >= 0) == (True, True)
    marks.clear()
    assert marks.read() == []
