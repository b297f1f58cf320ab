"""`training.selection`: the best epoch, its checkpoint, and the end of training."""

import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from conf.sections.training import SelectionConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import Batch
from pipelines.sample import Task
from pipelines.storage.folder import Location
from pipelines.tracking.metrics import described as described_metrics
from pipelines.tracking.metrics import validation_metrics
from pipelines.training import validation
from pipelines.training.checkpoint.checkpoints import Checkpoints
from pipelines.training.checkpoint.files import checkpoint_path, list_checkpoints
from pipelines.training.checkpoint.selection import Best, best_of, best_step, described, is_over, why_ended
from pipelines.training.checkpoint.state import TrainingState, newest_state
from pipelines.training.driver.checks import _check_best, _check_selection
from pipelines.training.ranks.predictions import Predictions
from pipelines.training.ranks.results import Evaluation
from pipelines.training.setup.recipe import make_exchange
from tests.pipelines.training.manifests import rgb_manifest

LOSS, OWN_LOSS, SCORE = "val/loss", "val/log_loss", "val_ema/f1_micro"


def history_of(values: list[float], metric: str = LOSS) -> list[dict[str, float]]:
    return [{"train/loss": 1.0, metric: value} for value in values]


@pytest.mark.parametrize("metric", [LOSS, OWN_LOSS, SCORE])
@pytest.mark.parametrize("min_delta", [0.0, 0.2])
@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_epoch_and_the_end_are_those_of_keras(metric: str, min_delta: float, patience: int, seed: int) -> None:
    rows = history_of(np.random.default_rng(seed).random(20).round(2).tolist(), metric)
    config = SelectionConfig(metric=metric, patience=patience, min_delta=min_delta)
    mode = "max" if metric == SCORE else "min"
    of_keras = keras.callbacks.EarlyStopping(metric, min_delta=min_delta, patience=patience, mode=mode)
    of_keras.set_model(SimpleNamespace(stop_training=False))
    of_keras.on_train_begin()
    for epoch, row in enumerate(rows):
        of_keras.on_epoch_end(epoch, row)
        history, best = rows[: epoch + 1], Best(of_keras.best_epoch + 1, of_keras.best)
        assert (best_of(history, config), best_step(history, config, 7), is_over(history, config)) == (
            best,
            7 * best.epoch,
            of_keras.model.stop_training,
        )
        if of_keras.model.stop_training:
            break


def test_what_is_no_number_is_never_the_best() -> None:
    config = SelectionConfig(metric=LOSS, patience=3)
    assert best_of(history_of([math.nan, 0.5, math.nan, 0.4, math.nan]), config) == Best(4, 0.4)
    nothing = history_of([math.nan] * 2)
    assert (best_of(nothing, config), best_step(nothing, config, 7)) == (None, None)


@pytest.mark.parametrize(
    ("metric", "earlier", "values", "ended"),
    [
        (LOSS, 0, [math.nan] * 2, False),
        (LOSS, 0, [math.nan] * 3, True),
        # Patience counts from the first epoch that has the metric.
        (OWN_LOSS, 10, [], False),
        (OWN_LOSS, 10, [math.nan] * 2, False),
        (OWN_LOSS, 10, [math.nan] * 3, True),
        (OWN_LOSS, 10, [0.5, 0.6, 0.7], False),
        (OWN_LOSS, 10, [0.5, 0.6, 0.7, 0.8], True),
    ],
)
def test_when_training_is_over(metric: str, earlier: int, values: list[float], ended: bool) -> None:
    history = history_of([0.5] * earlier) + history_of(values, metric)
    assert is_over(history, SelectionConfig(metric=metric, patience=3)) == ended


def test_without_a_metric_nothing_is_compared() -> None:
    config, history = SelectionConfig(), history_of([0.5, 0.6, 0.7])
    assert (best_of(history, config), is_over(history, config), described(history, config, 3)) == (None, False, {})


def test_the_record_says_why_training_ended() -> None:
    config, ended = SelectionConfig(metric=LOSS, patience=2), history_of([0.5, 0.25, 0.6, 0.7])
    assert (why_ended(ended[:3], config, 3), described(ended, config, 9)) == (
        "after all 3 epochs",
        {
            "training_ended": "after 4 of 9 epochs: 2 in a row without a better val/loss",
            "best_metric": LOSS,
            "best_epoch": "2",
            "best_value": "0.25",
        },
    )


@pytest.fixture
def checkpoints(tmp_path: Path, one_rank: Any) -> Checkpoints:
    config = SelectionConfig(metric=LOSS)
    initial, exchange = TrainingState(0, 0, 0, 16, "run", "data", []), make_exchange(load("smoke"), one_rank)
    variables, folder = [keras.Variable(np.zeros((2, 3), np.float32), name="weight")], Location.at(tmp_path)
    return Checkpoints(folder, initial, variables, exchange, one_rank, lambda history: best_step(history, config, 4))


def test_the_checkpoint_of_the_best_epoch_is_kept_and_the_one_before_it_is_not(checkpoints: Checkpoints) -> None:
    values, (weight,) = [0.9, 0.3, 0.6, 0.7, 0.2, 0.5, 0.4], checkpoints.variables
    kept = []
    for epoch in range(1, 8):
        weight.assign(tf.fill(weight.shape, float(epoch)))
        answers = Predictions(np.array([[epoch / 10]]), np.ones((1, 1), np.uint8), np.zeros(1, int), "multi_label")
        state = TrainingState(epoch, 4 * epoch, 0, 16, "run", "data", history_of(values[:epoch]))
        checkpoints.save(state, {"val": Evaluation({}, [], answers)})
        kept.append([int(path.stem.removeprefix("step-")) // 4 for path in list_checkpoints(checkpoints.folder)])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    checkpoints.take_best(20)
    assert checkpoints.thresholds(20) == {"val": [pytest.approx(0.25)]}, "half of what the only sample has"
    assert checkpoints.thresholds(4) == {}, "that checkpoint is gone"
    np.testing.assert_array_equal(weight, 5)
    # The count goes on where it was: it is in the newest checkpoint's history.
    history = newest_state(checkpoints.folder)[1].history
    assert [is_over(history, SelectionConfig(metric=LOSS, patience=patience)) for patience in (2, 3)] == [True, False]


def test_a_damaged_best_checkpoint_says_what_to_do(checkpoints: Checkpoints) -> None:
    checkpoints.save(TrainingState(1, 4, 0, 16, "run", "data", history_of([0.5])))
    path = checkpoint_path(checkpoints.folder, 4).path
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(RuntimeError, match=r"best epoch, is damaged .*training\.selection\.model=last and training\."):
        checkpoints.take_best(4)


def manifest(task: Task, classes: int, validated: bool = True) -> Manifest:
    names = ("train", "validation") if validated else ("train",)
    class_names = tuple(f"class {number}" for number in range(classes))
    return rgb_manifest(splits=dict.fromkeys(names, (32,) * classes), task=task, class_names=class_names)


@pytest.mark.parametrize(
    ("settings", "dataset", "message"),
    [
        (["metric=val/f1_micro"], ("multi_label", 3), ""),
        (
            ["metric=val/f1_micro"],
            ("single_label", 3),
            r"metric=val/f1_micro should be one of val/loss, val/top_1, val/f1_macro, val/mean_average_precision$",
        ),
        (["metric=val_ema/top_5"], ("single_label", 6), r"mean_average_precision, and training\.ema is null$"),
        (["metric=val_ema/top_5", "ema=0.9"], ("single_label", 6), ""),
        (
            ["metric=val/loss"],
            ("multi_label", 3, False),
            r"metric=val/loss needs a validation split, and .* has only train: leave out",
        ),
    ],
)
def test_a_metric_that_validation_does_not_have_is_refused_with_those_that_it_has(
    settings: list[str], dataset: tuple[Any, ...], message: str
) -> None:
    config = load("smoke", [f"training.{'selection.' if 'metric' in each else ''}{each}" for each in settings])
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        _check_selection(config.dataset.path, config.training, config.tracking, manifest(*dataset))


@pytest.mark.parametrize("key", ["patience=5", "min_delta=0.1", "model=last"])
def test_settings_without_a_metric_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"training\.selection\.{key} has no effect without training\.selection\.met"):
        load("smoke", [f"training.selection.{key}"])


def test_a_resumed_run_needs_the_checkpoint_of_its_best_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainingState(3, 12, 0, 8, "run", "data", history_of([0.5, 0.25, 0.75]))
    monkeypatch.setattr("pipelines.tracking.store.queries.is_finished", lambda run_id: True)

    def check(*more: str) -> None:
        training = load(
            "smoke", ["training.resume_run=run", "training.selection.metric=val/loss", "training.epochs=9", *more]
        ).training
        _check_best(checkpoint_path(Location.at(tmp_path), 12), state, training, steps=4, offline=False)

    with pytest.raises(ValueError, match=r"the best epoch is that of .*step-00000008.npz, which is not there: set "):
        check()
    check("training.selection.model=last")
    checkpoint_path(Location.at(tmp_path), 8).path.touch()
    check("training.selection.patience=2")
    with pytest.raises(ValueError, match=r"ended after 3 of 9 epochs: 1 in a row .* logged: raise training\.selection"):
        check("training.selection.patience=1")


@pytest.mark.parametrize(("task", "classes"), [("multi_label", 3), ("single_label", 3), ("single_label", 6)])
def test_validation_has_the_metrics_that_can_be_chosen(
    task: Task, classes: int, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = np.eye(classes, dtype=np.uint8)[np.arange(8) % classes]
    batch = Batch({}, targets, np.ones(8, np.float32), np.arange(8))
    monkeypatch.setattr(validation, "evaluation_batches", lambda *args, **kwargs: [batch])
    reader: Any = range(8)
    found = validation.evaluate(
        lambda images: tf.constant(targets, tf.float32),
        lambda t, z: tf.reduce_mean(z, -1),
        reader,
        one_rank,
        batch_size=8,
        class_names=[f"class {number}" for number in range(classes)],
        task=task,
        own_metrics={},
    )
    names = validation_metrics(task, classes, averaged=True)
    assert {f"{group}/{name}" for group in ("val", "val_ema") for name in found.metrics} == set(names)
    assert {*names} <= described_metrics().keys()
