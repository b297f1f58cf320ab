"""Pipelines on a real ring: their weights are those of data-parallel ranks that take the same micro-batches."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from conf.load import load
from jobs.train import TrainedRun
from tests.parallel.ring import on_ring

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(600)]

MICRO_BATCH, STEPS = 8, 3
TRAININGS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"micro_batches": 1},
    "four": {"micro_batches": 4},
    "lars": {"micro_batches": 2, "optimizer": "lars"},
    "lamb": {"micro_batches": 2, "optimizer": "lamb"},
    "dropped, augmented": {"micro_batches": 2, "drops": True},
    "bfloat16": {"micro_batches": 2, "precision": "bfloat16"},
    "compiled": {"micro_batches": 2, "jit_compile": True},
    "rates": {"micro_batches": 2, "factor": 0.5},
}


def train(
    stages: int,
    copies: int,
    steps: int,
    micro_batch: int,
    *,
    micro_batches: int,
    optimizer: str = "sgd",
    drops: bool = False,
    precision: str = "float32",
    jit_compile: bool = False,
    factor: float = 1.0,
    collective: Any = None,
) -> dict[str, Any]:
    """Train a small ResNet; what its variables are at the end, and what was counted.

    One stage is synchronous training: then each rank takes as many micro-batches as it needs for all copies.
    """
    import keras
    import tensorflow as tf

    from models.layers.augmentation import Augmentation
    from models.layers.preprocessing import InputGroup
    from models.losses import classification_loss
    from models.networks.model import build_model
    from pipelines.dataset.format.order import rank_parts
    from pipelines.training.modes.pipeline import Pipeline
    from pipelines.training.setup.recipe import make_mode

    keras.utils.set_random_seed(0)
    model = build_model(
        [InputGroup("bands", (16, 16, 3), "uint16", (1000.0,) * 3, (500.0,) * 3)],
        network="resnet_cifar",
        classes=4,
        upsampling="nearest",
        augmentation=Augmentation("dihedral") if drops else None,
        precision=precision,
        depth=8,
        width_factor=0.5,
        preactivation=False,
        stem_stride=1,
        dropout=0.2 if drops else 0.0,
        stochastic_depth=0.3 if drops else 0.0,
        zero_init_residual=True,
    )
    for variable in model.trainable_variables:
        if variable.path.endswith("gamma"):  # with the zeros of new blocks, half of the network would not matter
            variable.assign(tf.ones(variable.shape))
    mine = micro_batches if stages > 1 else micro_batches * copies // collective.size
    factors = {variable.path: factor for variable in model.trainable_variables[:3] if factor != 1.0}
    mode = f"{{name: pipeline, stages: {stages}}}" if stages > 1 else "synchronous"
    config = load(
        "smoke",
        [
            *(f"optimizer={optimizer}", f"training.mode={mode}", f"training.batch_size_per_worker={micro_batch}"),
            f"launch.num_workers={collective.size}",
            f"training.jit_compile={str(jit_compile).lower()}",
            f"warm_start.rate_factors={json.dumps(factors)}",
        ],
    )
    made = make_mode(
        config, model, classification_loss("multi_label"), collective, steps_per_epoch=steps, micro_batches=mine
    )
    made.optimizer.learning_rate = 0.5 if optimizer == "sgd" else 0.01
    rank, size = collective.rank // stages, collective.size // stages

    random, global_batch = np.random.default_rng(0), copies * micro_batches * micro_batch
    images = random.integers(0, 3000, (steps * global_batch, 16, 16, 3), dtype=np.uint16)
    targets = random.integers(0, 2, (len(images), 4)).astype(np.float32)
    start, losses = [np.array(each) for each in model.trainable_variables], []
    rows = rank_parts(
        random.permutation(len(images)),
        global_batch_size=global_batch,
        rank=rank,
        size=size,
        start_step=0,
        micro_batches=mine,
    )
    for number, chosen in enumerate(rows, start=1):
        seeds = tf.constant(chosen, tf.int32) if drops else None
        function = made.accumulate if number % mine else made.step
        assert function is not None
        found = function({"bands": tf.constant(images[chosen])}, tf.constant(targets[chosen]), seeds)
        if not number % mine:
            losses.append(float(found))
    result: dict[str, Any] = {}
    if isinstance(made, Pipeline):
        own = [np.array(each) for each in made.stage.network.trainable_variables]
        result = {"own": own, "idle": made.figures()["time/idle_share"], "payload": made.payload_bytes()}
    made.come_together()
    mean_losses = collective.sum(np.array(losses)) / collective.size  # equal in a pipeline
    moved = [np.array(each) - old for each, old in zip(model.trainable_variables, start, strict=True)]
    others = [np.array(each) for each in [*model.non_trainable_variables, *made.optimizer.variables]]
    return {**result, "moved": moved, "others": others, "losses": mean_losses}


def train_each(stages: int, copies: int, trainings: dict[str, dict[str, Any]], *sizes: int) -> dict[str, Any]:
    """Some trainings on one ring."""
    from pipelines.training.ranks.collective import HorovodCollective

    collective = HorovodCollective(stages, has_peers=stages > 1)
    return {
        name: train(stages, copies, *sizes, **settings, collective=collective) for name, settings in trainings.items()
    }


def trained_on(ranks: int, stages: int, copies: int, names: Sequence[str]) -> list[dict[str, Any]]:
    """What every rank gives; one stage: as many ranks with the whole network."""
    results: list[dict[str, Any]] = on_ring(
        ranks, train_each, stages, copies, {name: TRAININGS[name] for name in names}, STEPS, MICRO_BATCH
    )
    for other in results[1:]:
        for name, found in other.items():
            for key in ("moved", "others", "losses"):
                np.testing.assert_equal(found[key], results[0][name][key], f"{name}: {key} differ between ranks")
    return results


def assert_equal(trained: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Compare how far weights moved, moments, statistics and losses."""
    for key in ("moved", "others", "losses"):
        for values, others in zip(trained[key], expected[key], strict=True):
            assert np.linalg.norm(values - others) <= tolerance * (np.linalg.norm(others) + 1e-6)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The same trainings on one rank, with as many threads as the others: their number changes the last digits."""
    return trained_on(1, 1, 1, list(TRAININGS))[0]


@pytest.fixture(scope="module")
def two_stages() -> list[dict[str, Any]]:
    return trained_on(2, 2, 1, list(TRAININGS))


@pytest.mark.parametrize("name", TRAININGS)
def test_two_stages_are_one_rank_with_the_same_micro_batches(
    name: str, two_stages: list[dict[str, Any]], alone: dict[str, Any]
) -> None:
    assert min(np.linalg.norm(each) for each in alone[name]["moved"]) > 0
    assert_equal(two_stages[0][name], alone[name])


@pytest.mark.parametrize("stages", [3, 4])
def test_more_stages_are_one_rank_with_the_same_micro_batches(alone: dict[str, Any], stages: int) -> None:
    for name, found in trained_on(stages, stages, 1, ["one micro-batch", "four"])[0].items():
        assert_equal(found, alone[name])
        assert found["idle"] == pytest.approx((stages - 1) / (TRAININGS[name]["micro_batches"] + stages - 1))


def test_two_pipelines_are_two_data_parallel_ranks() -> None:
    names = ["one micro-batch", "four", "lars"]
    expected, ranks = trained_on(2, 1, 2, names)[0], trained_on(4, 2, 2, names)
    for name in names:
        assert_equal(ranks[0][name], expected[name])
        for first, second in ((0, 2), (1, 3)):  # before they come together
            np.testing.assert_equal(ranks[first][name]["own"], ranks[second][name]["own"])


def test_idle_ticks_are_those_of_the_formula(two_stages: list[dict[str, Any]]) -> None:
    for rank in two_stages:
        for name, found in rank.items():
            assert found["idle"] == pytest.approx(1 / (TRAININGS[name]["micro_batches"] + 1))


def test_the_payload_is_that_of_the_border(two_stages: list[dict[str, Any]]) -> None:
    # Two ranks send 2 (2 - 1) payloads: a micro-batch of activations and one of gradients, 8 * 16 * 16 * 8 floats each.
    for name in ("one micro-batch", "four"):
        assert two_stages[0][name]["payload"] == TRAININGS[name]["micro_batches"] * 4 * 8 * 16 * 16 * 8


@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_a_pipeline_and_one_worker_continue_each_other(
    train_small: Callable[..., TrainedRun],
    let_ranks_die: Callable[..., None],
    weights: Callable[[TrainedRun], dict[str, np.ndarray]],
) -> None:
    """Their checkpoints are of the whole network and optimizer, and a killed stage costs no bit."""
    pipeline, alone = ["training.mode={name: pipeline, stages: 2}"], ["launch.num_workers=1"]

    batches = ("training.batch_size_per_worker=4", "training.accumulation_steps=2", "training.checkpoint_every_steps=1")
    undisturbed = train_small(*batches, *pipeline, output="undisturbed")
    expected = weights(undisturbed)
    for metrics in undisturbed.summary.history:
        assert metrics["time/idle_share"] == pytest.approx(1 / 3)
        assert metrics["time/samples_seen"] == metrics["time/epoch"] * 32
    # A border of 4 * 120 * 120 * 8 floats for each of 2 micro-batches; 2 ranks send 2 payloads.
    assert undisturbed.summary.payload_bytes_per_step % 2 == 0

    let_ranks_die((1, 5))
    np.testing.assert_equal(weights(train_small(*batches, *pipeline, "launch.retries=1", output="killed")), expected)

    for before, after, rank in ((pipeline, alone, 1), (alone, pipeline, 0)):
        folder = f"rank-{rank}"
        let_ranks_die((rank, 5))
        with pytest.raises(RuntimeError, match=f"rank {rank}"):
            train_small(*batches, *before, output=folder)
        let_ranks_die()
        continued = weights(train_small(*batches, *after, "training.resume_run=latest", output=folder))
        assert continued.keys() == expected.keys()
        for name, value in expected.items():
            assert np.linalg.norm(continued[name] - value) <= 1e-3 * np.linalg.norm(value) + 1e-6, name
