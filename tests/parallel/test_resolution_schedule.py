"""Trainings at growing resolution: any number of ranks, and killed between two sizes, end as the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from jobs.train import TrainedRun, train
from pipelines.tracking.models import load_model
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

SCHEDULE = "input.resolution_schedule=[{until: {steps: 4}, scale: 0.5}, {until: {steps: 8}, scale: 0.75}]"
GLOBAL_BATCH, SIZES = 16, [16, 24, 32]


def moved_by(global_batch: int, sizes: list[int]) -> list[Any]:
    """Train a small network for two steps at each size; how far its weights moved, and its moving statistics."""
    import keras
    import numpy as np
    import tensorflow as tf

    from conf.load import load
    from models.layers.normalisation import normalise_over
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.training.collective import HorovodCollective, ranks_of_job
    from pipelines.training.recipe import make_exchange, make_optimizer
    from pipelines.training.step import make_train_step

    collective = HorovodCollective(ranks_of_job())
    keras.utils.set_random_seed(0)
    config = load("smoke")
    group = InputGroup("rgb", (32, 32, 3), "uint8", (128.0,) * 3, (60.0,) * 3)
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
    optimizer, exchange = make_optimizer(config.optimizer, model), make_exchange(config, collective)
    optimizer.learning_rate = 0.05
    step = make_train_step(model, classification_loss("multi_label"), optimizer, exchange, jit_compile=False)
    start = [np.array(variable) for variable in model.trainable_variables]
    random = np.random.default_rng(0)
    part = global_batch // collective.size
    mine = slice(collective.rank * part, (collective.rank + 1) * part)
    for size in np.repeat(sizes, 2).tolist():
        images = random.integers(0, 256, (global_batch, 32, 32, 3)).astype(np.uint8)
        targets = random.integers(0, 2, (global_batch, 4)).astype(np.float32)
        step({"rgb": tf.constant(images[mine])}, tf.constant(targets[mine]), None, (size, size))
    moved = [np.array(variable) - old for variable, old in zip(model.trainable_variables, start, strict=True)]
    return [*moved, *(np.array(variable) for variable in model.non_trainable_variables)]


def test_two_ranks_of_8_are_one_of_16_at_every_size() -> None:
    first, second = on_ring(2, moved_by, GLOBAL_BATCH, SIZES)
    # This process is the one rank, which needs no launcher for it.
    for own, other, alone in zip(first, second, moved_by(GLOBAL_BATCH, SIZES), strict=True):
        np.testing.assert_array_equal(own, other)
        assert np.linalg.norm(own - alone) <= 1e-3 * np.linalg.norm(alone)


@pytest.mark.spark
def test_a_training_that_dies_within_a_part_goes_on_at_its_size(
    spark: SparkSession,
    small_dataset: Path,
    small_network: str,
    tmp_path: Path,
    mlflow_store: str,
    let_ranks_die: Callable[..., None],
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [f"dataset.path={small_dataset}", small_network, SCHEDULE, "training.epochs=3", "launch.retries=1"]
    settings += ["training.checkpoint_every_steps=1", "input.augmentation=dihedral", "model.dropout=0.1"]
    expected = train(load("smoke", [*settings, f"training.output={tmp_path / 'undisturbed'}"]))
    sizes = "60 x 60 pixels in epoch 1, 90 x 90 pixels in epoch 2, 120 x 120 pixels in epoch 3"
    assert f"images of {sizes}; the training step is compiled for each size" in "".join(capsys.readouterr())
    let_ranks_die((1, 6))  # the second step of the second epoch
    trained = train(load("smoke", [*settings, f"training.output={tmp_path / 'killed'}"]))
    client = MlflowClient(mlflow_store)
    run = client.get_run(trained.run.run_id)
    assert run.data.tags["attempt"] == "2"
    assert run.data.params["input.resolution_schedule"].startswith("[{'until': {'steps': 4}, 'scale': 0.5}")
    found = weights(trained)
    for name, value in weights(expected).items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    for one, other in zip(trained.summary.history, expected.summary.history, strict=True):
        for name in ("train/loss", "val/loss", "train/image_height"):
            assert one[name] == other[name], name
    points = client.get_metric_history(trained.run.run_id, "train/image_height")
    assert [(point.step, point.value) for point in points] == [(4, 60), (8, 90), (12, 120)]
    served = load_model(trained.summary.model_uri)[0]
    assert {tensor.shape[1] for tensor in served.inputs} == {120, 60, 20}
