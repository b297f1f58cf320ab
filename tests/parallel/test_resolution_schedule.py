"""Training at growing resolution on any number of ranks."""

from typing import Any

import numpy as np
import pytest

from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

GLOBAL_BATCH, SIZES = 16, [16, 24, 32]


def moved_by(global_batch: int, sizes: list[int]) -> list[Any]:
    """Train a small network for two steps at each size; how far its weights moved, and its moving statistics."""
    import keras
    import tensorflow as tf

    from conf.load import load
    from models.layers.normalisation import normalise_over
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.ranks.collective import HorovodCollective, ranks_of_job
    from pipelines.training.setup.recipe import make_mode

    collective = HorovodCollective(ranks_of_job())
    keras.utils.set_random_seed(0)
    config, group = load("smoke"), InputGroup("rgb", (32, 32, 3), "uint8", (128.0,) * 3, (60.0,) * 3)
    network = {"network": "resnet_cifar", "depth": 8, "width_factor": 0.5, "preactivation": False, "stem_stride": 1}
    rest = {
        "classes": 4,
        "upsampling": "nearest",
        "augmentation": None,
        "dropout": 0.0,
        "stochastic_depth": 0.0,
        "zero_init_residual": True,
    }
    model = build_model([group], resizes=True, **network, **rest)
    if collective.size > 1:
        normalise_over(model, collective.group)
    mode = make_mode(config, model, classification_loss("multi_label"), collective, steps_per_epoch=len(sizes))
    mode.optimizer.learning_rate = 0.05
    start = [np.array(variable) for variable in model.trainable_variables]
    random, part = np.random.default_rng(0), global_batch // collective.size
    mine = slice(collective.rank * part, (collective.rank + 1) * part)
    for size in np.repeat(sizes, 2).tolist():
        images = random.integers(0, 256, (global_batch, 32, 32, 3)).astype(np.uint8)
        targets = random.integers(0, 2, (global_batch, 4)).astype(np.float32)
        mode.step({"rgb": tf.constant(images[mine])}, tf.constant(targets[mine]), None, (size, size))
    moved = [np.array(variable) - old for variable, old in zip(model.trainable_variables, start, strict=True)]
    return [*moved, *(np.array(variable) for variable in model.non_trainable_variables)]


def test_two_ranks_of_8_are_one_of_16_at_every_size() -> None:
    first, second = on_ring(2, moved_by, GLOBAL_BATCH, SIZES)
    # This process is the one rank, which needs no launcher for it.
    for own, other, alone in zip(first, second, moved_by(GLOBAL_BATCH, SIZES), strict=True):
        np.testing.assert_array_equal(own, other)
        assert np.linalg.norm(own - alone) <= 1e-3 * np.linalg.norm(alone)
