"""N ranks with batch b are one rank with batch N * b."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(240)]

GLOBAL_BATCH, STEPS = 8, 3
CODECS = {"none": 1e-4, "fp16": 2e-2}
"""By how much, of its way, a weight may differ with each."""


def three_steps(codec: str, global_batch: int, steps: int) -> dict[str, Any]:
    """Train a small ResNet with frozen batch norm on this rank's part of fixed batches; its weights at the end."""
    import keras
    import tensorflow as tf

    from conf.load import load
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.ranks.collective import HorovodCollective
    from pipelines.training.setup.recipe import make_mode

    collective = HorovodCollective()
    keras.utils.set_random_seed(collective.rank)  # different weights, which the broadcast must make equal
    groups = [InputGroup("bands", (16, 16, 3), "uint16", (1000.0,) * 3, (500.0,) * 3)]
    config = load("smoke", [f"exchange.codec={codec}", "model.width_factor=0.125"])
    settings = {**config.model.arguments(), "upsampling": "nearest", "augmentation": None}
    model = build_model(groups, network="resnet", classes=4, **settings)
    for layer in model.layers:
        # Batch statistics are those of a rank's own part: frozen, they are the same on any number of ranks.
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    # A zero last gamma would leave every block out of the comparison.
    for variable in model.variables:
        if variable.path.endswith("gamma"):
            variable.assign(tf.ones(variable.shape))
    mode = make_mode(config, model, classification_loss("multi_label"), collective, steps_per_epoch=steps)
    mode.optimizer.learning_rate = 0.5
    collective.broadcast([variable.value for variable in [*model.variables, *mode.optimizer.variables]])
    random, part = np.random.default_rng(0), global_batch // collective.size
    mine = slice(collective.rank * part, (collective.rank + 1) * part)
    start = [np.array(variable) for variable in model.trainable_variables]
    for _ in range(steps):
        images = random.integers(0, 3000, (global_batch, 16, 16, 3), dtype=np.uint16)
        targets = random.integers(0, 2, (global_batch, 4)).astype(np.float32)
        mode.step({"bands": tf.constant(images[mine])}, tf.constant(targets[mine]))
    return {"weights": [np.array(variable) for variable in model.trainable_variables], "start": start}


def with_each_codec(codecs: Sequence[str], *settings: int) -> dict[str, dict[str, Any]]:
    """What some trainings give, one after the other."""
    return {codec: three_steps(codec, *settings) for codec in codecs}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one rank gives: this process, which needs no launcher for it."""
    return three_steps("none", GLOBAL_BATCH, STEPS)


@pytest.fixture(scope="module")
def together() -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks gives, by codec."""
    return on_ring(2, with_each_codec, tuple(CODECS), GLOBAL_BATCH, STEPS)


@pytest.mark.parametrize(("codec", "relative"), CODECS.items())
def test_two_ranks_give_the_weights_of_one(
    together: list[dict[str, dict[str, Any]]], alone: dict[str, Any], codec: str, relative: float
) -> None:
    first, second = (each[codec] for each in together)
    np.testing.assert_equal(first["weights"], second["weights"])
    for weights, expected, start in zip(first["weights"], alone["weights"], first["start"], strict=True):
        moved = np.linalg.norm(expected - start)
        assert moved > 0
        # Measured by how far the weights moved: most of a weight is its start, which proves nothing.
        assert np.linalg.norm(weights - expected) <= relative * moved
