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
from pipelines.training.accumulation import Accumulation
from pipelines.training.loss_scale import LossScale
from pipelines.training.recipe import make_exchange, make_optimizer
from pipelines.training.step import Step, make_accumulate, make_train_step

GROUPS = [InputGroup("bands", (32, 32, 3), "uint16", (1000.0,) * 3, (500.0,) * 3)]
LOSS = classification_loss("multi_label")


def build(precision: str, one_rank: Any) -> tuple[keras.Model, keras.optimizers.Optimizer, LossScale | None, Step]:
    keras.utils.set_random_seed(0)
    config = load("smoke", ["model.width_factor=0.125", f"training.precision={precision}"])
    settings = {**config.model.arguments(), "upsampling": "nearest", "augmentation": None}
    model = build_model(GROUPS, network="resnet", classes=4, precision=precision, **settings)
    for variable in model.variables:
        if variable.path.endswith("gamma"):
            variable.assign(tf.fill(variable.shape, 0.5))
    optimizer = make_optimizer(config.optimizer, model)
    optimizer.learning_rate = 0.05
    scale = LossScale() if precision == "float16" else None
    exchange = make_exchange(config, one_rank)
    step = make_train_step(model, LOSS, optimizer, exchange, jit_compile=False, loss_scale=scale)
    return model, optimizer, scale, step


def batch(number: int) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    random = np.random.default_rng(number)
    images = random.integers(0, 3000, (8, 32, 32, 3), dtype=np.uint16)
    return {"bands": tf.constant(images)}, tf.constant(random.integers(0, 2, (8, 4)).astype(np.float32))


def test_half_precision_learns_what_float32_does_in_float32_variables(one_rank: Any) -> None:
    full, _, _, full_step = build("float32", one_rank)
    start = [np.array(variable) for variable in full.trainable_variables]
    # One step: batch norm over few samples makes the next ones differ by ten times as much each.
    loss = float(full_step(*batch(0)))
    moved = np.concatenate([np.ravel(v) - np.ravel(s) for v, s in zip(full.trainable_variables, start, strict=True)])
    for precision, cosine in (("bfloat16", 0.8), ("float16", 0.97)):
        half, optimizer, _, half_step = build(precision, one_rank)
        assert float(half_step(*batch(0))) == pytest.approx(loss, rel=0.02), precision
        variables = [*half.variables, *optimizer.variables]
        assert {str(v.dtype) for v in variables if "float" in str(v.dtype)} == {"float32"}
        assert one_rank.reduced == {tf.float32}
        here = np.concatenate([np.ravel(v) - np.ravel(s) for v, s in zip(half.trainable_variables, start, strict=True)])
        assert np.dot(here, moved) > cosine * np.linalg.norm(here) * np.linalg.norm(moved), precision
        assert np.linalg.norm(here) == pytest.approx(np.linalg.norm(moved), rel=0.1), precision


def test_an_overflow_in_half_floats_leaves_weights_and_moments_alone(one_rank: Any) -> None:
    model, optimizer, scale, step = build("float16", one_rank)
    assert scale is not None
    step(*batch(0))
    scale.scale.assign(2.0**60)
    before = [np.array(variable) for variable in [*model.trainable_variables, *optimizer.variables]]
    assert np.isfinite(float(step(*batch(1))))
    after = [np.array(variable) for variable in [*model.trainable_variables, *optimizer.variables]]
    assert float(scale.scale) == 2.0**59
    for own, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(own, other)


def test_an_overflow_in_any_micro_batch_skips_the_step(one_rank: Any) -> None:
    model, optimizer, scale, _ = build("float16", one_rank)
    assert scale is not None
    sums = Accumulation(model, 2)
    config = load("smoke")
    exchange = make_exchange(config, one_rank)
    accumulate = make_accumulate(model, LOSS, sums, jit_compile=False, loss_scale=scale)
    update = make_train_step(model, LOSS, optimizer, exchange, jit_compile=False, accumulation=sums, loss_scale=scale)
    kernel = model.get_layer("stem_conv").kernel
    before = np.array(kernel)
    scale.scale.assign(2.0**60)
    accumulate(*batch(0))
    scale.scale.assign(2.0**15)
    update(*batch(1))
    np.testing.assert_array_equal(np.array(kernel), before)
    accumulate(*batch(0))  # nothing of the overflow is left
    update(*batch(1))
    assert np.isfinite(np.array(kernel)).all()
    assert not np.array_equal(np.array(kernel), before)
