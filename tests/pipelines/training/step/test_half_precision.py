"""A training step in half precision: what is float32, and what an overflow does."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from models.layers.preprocessing import InputGroup
from models.losses import classification_loss
from models.networks.model import build_model
from pipelines.training.setup.recipe import make_mode
from pipelines.training.step.loss_scale import LossScale

GROUPS = [InputGroup("bands", (32, 32, 3), "uint16", (1000.0,) * 3, (500.0,) * 3)]
LOSS = classification_loss("multi_label")


def build(precision: str, one_rank: Any, micro_batches: int = 1) -> tuple[keras.Model, Any, Any]:
    """A network, the mode that trains it, and the scale of its loss."""
    keras.utils.set_random_seed(0)
    config = load("smoke", ["model.width_factor=0.125", f"training.precision={precision}"])
    settings = {**config.model.arguments(), "upsampling": "nearest", "augmentation": None}
    model = build_model(GROUPS, network="resnet", classes=4, precision=precision, **settings)
    for variable in model.variables:
        if variable.path.endswith("gamma"):
            variable.assign(tf.fill(variable.shape, 0.5))
    scale = LossScale() if precision == "float16" else None
    mode = make_mode(config, model, LOSS, one_rank, steps_per_epoch=1, micro_batches=micro_batches, loss_scale=scale)
    mode.optimizer.learning_rate = 0.05
    return model, mode, scale


def batch(number: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    random = np.random.default_rng(number)
    images = random.integers(0, 3000, (8, 32, 32, 3), dtype=np.uint16)
    return {"bands": tf.constant(images)}, tf.constant(random.integers(0, 2, (8, 4)).astype(np.float32))


@pytest.mark.long
def test_half_precision_learns_what_float32_does_in_float32_variables(one_rank: Any) -> None:
    def step_of(precision: str) -> tuple[float, np.ndarray]:
        """The loss of a step, and by how much it moved the weights."""
        model, mode, _ = build(precision, one_rank)
        variables = [*model.variables, *mode.optimizer.variables]
        assert {str(v.dtype) for v in variables if "float" in str(v.dtype)} == {"float32"}
        before = flat(model)
        return float(mode.step(*batch(0))), flat(model) - before

    # One step: batch norm over few samples makes the next ones differ by ten times as much each.
    loss, moved = step_of("float32")
    for precision, cosine in (("bfloat16", 0.8), ("float16", 0.97)):
        half_loss, here = step_of(precision)
        assert half_loss == pytest.approx(loss, rel=0.02), precision
        assert np.linalg.norm(here) == pytest.approx(np.linalg.norm(moved), rel=0.1), precision
        assert np.dot(here, moved) > cosine * np.linalg.norm(here) * np.linalg.norm(moved), precision
    assert one_rank.reduced == {tf.float32}


def flat(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.ravel(variable) for variable in model.trainable_variables])


@pytest.mark.long
def test_an_overflow_in_any_micro_batch_skips_the_step_and_leaves_nothing_for_the_next_one(one_rank: Any) -> None:
    model, mode, scale = build("float16", one_rank, micro_batches=2)
    before = flat(model)
    for first_scale, is_skipped in ((2.0**60, True), (2.0**15, False)):
        scale.scale.assign(first_scale)
        mode.accumulate(*batch(0))
        scale.scale.assign(2.0**15)
        mode.step(*batch(1))
        assert np.array_equal(flat(model), before) == is_skipped
    assert np.isfinite(flat(model)).all()
