import itertools
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from models.layers.augmentation import mixing_coefficients
from models.schedules import constant, gradual_warmup
from pipelines.dataset.read.reader import Batch
from pipelines.launch.rank.report import StoppedOnRequest
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.checkpoints import Checkpoints
from pipelines.training.checkpoint.state import TrainingState, newest_state
from pipelines.training.setup.recipe import make_mode
from pipelines.training.step.clock import Clock
from pipelines.training.step.loop import EpochResult, LossTotal, StepHooks, Trainer, train_epoch
from pipelines.training.step.step import Step
from pipelines.training.step.step_inputs import Mixing, StepInputs


def batches(count: int) -> Iterator[Batch]:
    for _ in range(count):
        yield Batch(
            {"a": np.zeros((4, 2, 2, 1), np.uint16)}, np.zeros((4, 3), np.uint8), np.ones(4, np.float32), np.arange(4)
        )


@pytest.fixture
def one_epoch(one_rank: Any) -> Callable[..., EpochResult]:
    """An epoch of so many batches on one rank, at a rate that stays where it is unless `settings` say otherwise."""

    def run(count: int | list[Batch], step: Step, first_step: int, **settings: Any) -> EpochResult:
        optimizer = settings.pop("optimizer", keras.optimizers.SGD(0.0))
        schedule, block = settings.pop("schedule", constant(1.0)), settings.pop("block", lambda step: step)
        trainer = Trainer(step, optimizer, schedule, one_rank, settings.pop("stop", None), block=block)
        given = batches(count) if isinstance(count, int) else iter(count)
        inputs = StepInputs(settings.pop("seeds_of", None), settings.pop("mixing", None))
        hooks = StepHooks(saver=settings.pop("saver", None))
        return train_epoch(given, trainer, first_step=first_step, inputs_of=inputs, hooks=hooks, **settings)

    return run


def test_rates_follow_the_schedule_and_losses_are_averaged(one_epoch: Callable[..., EpochResult]) -> None:
    optimizer, seen = keras.optimizers.SGD(0.0), []

    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        seen.append(float(optimizer.learning_rate))
        return tf.constant(float(len(seen)))

    result = one_epoch(4, step, 5, optimizer=optimizer, schedule=gradual_warmup(constant(1.0), 10))
    assert [*seen, result.loss] == pytest.approx([0.6, 0.7, 0.8, 0.9, 2.5])
    assert result.images_per_second > 0 <= result.input_wait_fraction < 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_loss_that_is_not_finite_stops_with_rank_and_step(
    bad: float, at: int, one_epoch: Callable[..., EpochResult]
) -> None:
    losses = iter([bad if number == at else 1.0 for number in range(4)])
    with pytest.raises(FloatingPointError, match=rf"rank 0 at step {20 + at}"):
        one_epoch(4, lambda images, targets, seeds: tf.constant(next(losses)), 20)


def test_a_gradient_that_is_not_finite_is_told_alike(one_epoch: Callable[..., EpochResult]) -> None:
    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        raise tf.errors.InvalidArgumentError(None, None, "assertion failed: [rank 0: these gradients are not finite]")

    with pytest.raises(
        FloatingPointError, match=r"gradients are not finite on rank 0 at step 7: lower the learning rate"
    ) as raised:
        one_epoch(1, step, 7)
    # TensorFlow's trace of the graph is no part of what is shown.
    assert "InvalidArgumentError" not in "".join(traceback.format_exception(raised.value))


def test_the_step_is_given_mixed_samples_and_their_seeds(one_epoch: Callable[..., EpochResult]) -> None:
    given = []

    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        given.append((images["a"].numpy().reshape(4, -1), targets.numpy(), np.asarray(seeds).tolist()))
        return tf.constant(1.0)

    def batch() -> Batch:
        pixels = np.random.default_rng(0).integers(0, 3000, (4, 2, 2, 1), dtype=np.uint16)
        return Batch({"a": pixels}, np.eye(4, 3, dtype=np.uint8), np.ones(4, np.float32), np.array([7, 3, 0, 9]))

    mixing = Mixing(alpha=1.0, seed=5, epoch=2)
    one_epoch([batch()], step, 0, mixing=mixing, seeds_of=lambda rows: (rows * 10).astype(np.int32))
    ((pixels, targets, seeds),) = given
    assert seeds == [70, 30, 0, 90]
    c = mixing_coefficients(1.0, seed=5, epoch=2, rows=[7, 3, 0, 9])[:, np.newaxis]
    assert 0.01 < c.min() < c.max() < 0.99
    for found, before, atol, rtol in (
        (pixels, batch().images["a"].reshape(4, -1).astype(float), 0.501, 0.0),
        (targets, batch().targets.astype(float), 0.0, 1e-6),
    ):
        np.testing.assert_allclose(found, c * before + (1 - c) * before[[1, 0, 3, 2]], atol=atol, rtol=rtol)


class Saver:
    """Keeps what it is told to save."""

    def __init__(self, every: int = 100) -> None:
        self.every, self.saved, self.seconds = every, [], []

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def save(self, step: int, losses: LossTotal, seconds: float) -> None:
        self.saved.append((step, losses.sum, losses.count))
        self.seconds.append(seconds)


def counting_step() -> Step:
    values = itertools.count(1.0)
    return lambda images, targets, seeds: tf.constant(next(values))


def test_checkpoints_come_at_multiples_and_count_earlier_steps(one_epoch: Callable[..., EpochResult]) -> None:
    saver = Saver(every=3)
    result = one_epoch(4, counting_step(), 5, earlier=LossTotal(10.0, 5), saver=saver)
    # Steps 6 to 9: at 6 after the first, at 9 after the last.
    assert (saver.saved, result.loss) == ([(6, 11.0, 6), (9, 20.0, 9)], 20.0 / 9)
    # A step that is alone may be compiling.
    assert [seconds > 0.0 for seconds in saver.seconds] == [False, True]


class AskedAt:
    """A stop that some rank was asked for before one step; what `StopAgreement` is to the loop."""

    def __init__(self, at: int) -> None:
        self.at, self.steps = at, 0

    def announce(self) -> None:
        self.steps += 1

    def requests(self) -> tf.Tensor:
        return tf.constant(float(self.steps > self.at))


@pytest.mark.parametrize(
    ("steps", "asked_before", "every", "stops_after"),
    [
        # The sum of a step is known one step later; that of the last one at the end of the epoch.
        (4, 0, 1, 2),
        (4, 1, 1, 3),
        (4, 2, 1, 4),
        (4, 3, 1, 4),
        # Ranks that train alone know it after step 4, where each has weights of its own, and come together after 6.
        (8, 2, 3, 6),
    ],
)
def test_a_stop_that_is_asked_for_writes_a_checkpoint(
    steps: int, asked_before: int, every: int, stops_after: int, one_epoch: Callable[..., EpochResult]
) -> None:
    saver, stop = Saver(), AskedAt(asked_before)
    with pytest.raises(StoppedOnRequest, match=f"stopped after step {stops_after}$"):
        one_epoch(steps, counting_step(), 0, stop=stop, saver=saver, block=lambda step: step // every * every)
    assert saver.saved == [(stops_after, sum(range(1, stops_after + 1)), stops_after)]


def test_a_stop_after_the_epoch_is_left_to_the_next_one(one_epoch: Callable[..., EpochResult]) -> None:
    # Workers of a parameter server agree on a step; those that have ended the epoch before have not heard of it.
    saver = Saver()
    result = one_epoch(4, counting_step(), 0, stop=AskedAt(2), saver=saver, block=lambda step: -1)
    assert (result.loss, saver.saved) == (2.5, [])


def test_a_codec_that_overflows_stops_the_step_before_its_update(
    tmp_path: Path, one_epoch: Callable[..., EpochResult], one_rank: Any
) -> None:
    """A spike gives a finite loss and gradients above fp16's 65504, of which no weight learns anything."""
    inputs = keras.Input((2, 2, 1), dtype="uint16", name="a")
    flat = keras.layers.Flatten()(keras.ops.cast(inputs, "float32") + 1.0)
    model = keras.Model({"a": inputs}, keras.layers.Dense(3, use_bias=False)(flat))
    scale, scales = tf.Variable(1.0), iter([1.0, 1.0, 1e7])
    plain = "optimizer={name: sgd, momentum: 0.0, nesterov: false, weight_decay: 0.0}"
    config = load("smoke", ["exchange.codec=fp16", "exchange.dense_below=0", plain])
    mode = make_mode(config, model, lambda t, z: scale * tf.reduce_mean((z - t) ** 2, -1), one_rank, steps_per_epoch=6)

    def step(images: dict[str, tf.Tensor], targets: tf.Tensor, seeds: tf.Tensor | None) -> tf.Tensor:
        scale.assign(next(scales))
        return mode.step(images, targets, seeds)

    initial = TrainingState(0, 0, 0, 4, "run", "data", [])
    checkpoints = Checkpoints(Location.at(tmp_path), initial, model.variables, mode.exchange, one_rank)

    class EveryStep(Saver):
        def save(self, step: int, losses: LossTotal, seconds: float) -> None:
            checkpoints.save(TrainingState(0, step, 0, 4, "run", "data", [], losses.sum, losses.count))

    with pytest.raises(
        FloatingPointError,
        match=r"mean of the gradients is not finite at step 2 after exchange\.codec=fp16, .* lower exchange\.codec\.",
    ):
        one_epoch(6, step, 0, optimizer=mode.optimizer, saver=EveryStep(1))
    path, state = newest_state(Location.at(tmp_path))
    with np.load(path.path) as saved:  # the weights are those of the step before
        (kernel,) = [saved[name] for name in saved.files if name.endswith("kernel")]
    np.testing.assert_array_equal(kernel, model.trainable_variables[0])
    assert (state.step, list(tmp_path.glob("*00000003*")), checkpoints.how_to_continue()) == (
        2,
        [],
        f"continue from {tmp_path}/step-00000002.npz with training.resume_run=run",
    )


def test_a_step_takes_its_micro_batches_one_by_one(one_rank: Any) -> None:
    calls: list[tuple[str, float, list[int]]] = []
    optimizer = keras.optimizers.SGD(0.0)

    def record(name: str, seeds: tf.Tensor) -> tf.Tensor:
        calls.append((name, float(optimizer.learning_rate), seeds.numpy().tolist()))
        return tf.constant(1.0)

    trainer = Trainer(
        lambda images, targets, seeds=None: record("update", seeds),
        optimizer,
        lambda step: 1.0 + step,
        one_rank,
        accumulate=lambda images, targets, seeds=None: record("accumulate", seeds),
        micro_batches=3,
    )
    saver, rows = Saver(every=1), itertools.count()
    inputs = StepInputs(lambda _: np.array([next(rows)], np.int32))
    result = train_epoch(batches(6), trainer, first_step=5, inputs_of=inputs, hooks=StepHooks(saver=saver))
    assert [(name, seeds) for name, _, seeds in calls] == [
        (name, [number]) for number, name in enumerate(["accumulate", "accumulate", "update"] * 2)
    ]
    assert ([rate for name, rate, _ in calls if name == "update"], saver.saved, result.loss) == (
        [6.0, 7.0],
        [(6, 1.0, 1), (7, 2.0, 2)],
        1.0,
    )


def test_images_of_all_micro_batches_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(0.0)  # every look at the clock is one second later
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    for number in range(1, 7):
        clock.batch_arrived(4)
        if number % 3 == 0:
            clock.step_done()
    assert clock._images == 12  # of the second step: the first one compiles
