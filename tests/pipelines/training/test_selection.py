"""`training.selection`: the best epoch, its checkpoint, and the end of training."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from conf.selection import SelectionConfig
from pipelines.dataset.manifest import Manifest
from pipelines.dataset.reader import Batch
from pipelines.sample import Task
from pipelines.tracking.metrics import described as described_metrics
from pipelines.tracking.metrics import validation_metrics
from pipelines.training import evaluation
from pipelines.training.checkpoint import TrainingState, newest_state
from pipelines.training.checkpoint_files import checkpoint_path, list_checkpoints
from pipelines.training.checks import _check_best, _check_selection
from pipelines.training.predictions import Predictions
from pipelines.training.recipe import make_exchange
from pipelines.training.results import Evaluation
from pipelines.training.resume import Checkpoints
from pipelines.training.selection import Best, best_of, best_step, described, is_over, why_ended

LOSS, OWN_LOSS, SCORE = "val/loss", "val/log_loss", "val_ema/f1_micro"


def history_of(values: list[float], metric: str = LOSS) -> list[dict[str, float]]:
    return [{"train/loss": 1.0, metric: value} for value in values]


@pytest.mark.parametrize("metric", [LOSS, OWN_LOSS, SCORE])
@pytest.mark.parametrize("min_delta", [0.0, 0.2])
@pytest.mark.parametrize("patience", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_epoch_and_the_end_are_those_of_keras(metric: str, min_delta: float, patience: int, seed: int) -> None:
    values = np.random.default_rng(seed).random(20).round(2).tolist()
    config = SelectionConfig(metric=metric, patience=patience, min_delta=min_delta)
    mode = "max" if metric == SCORE else "min"
    of_keras = keras.callbacks.EarlyStopping(metric, min_delta=min_delta, patience=patience, mode=mode)
    of_keras.set_model(SimpleNamespace(stop_training=False))
    of_keras.on_train_begin()
    for epoch, row in enumerate(history_of(values, metric)):
        of_keras.on_epoch_end(epoch, row)
        history = history_of(values[: epoch + 1], metric)
        best = best_of(history, config)
        assert best == Best(of_keras.best_epoch + 1, of_keras.best)
        assert best_step(history, config, 7) == 7 * best.epoch
        assert is_over(history, config) == of_keras.model.stop_training
        if is_over(history, config):
            break


def test_what_is_no_number_is_never_the_best() -> None:
    config = SelectionConfig(metric=LOSS, patience=3)
    assert best_of(history_of([math.nan, 0.5, math.nan, 0.4, math.nan]), config) == Best(4, 0.4)
    assert best_of(history_of([math.nan] * 2), config) is None
    assert best_step(history_of([math.nan] * 2), config, 7) is None
    assert not is_over(history_of([math.nan] * 2), config)
    assert is_over(history_of([math.nan] * 3), config)


def test_patience_counts_from_the_first_epoch_that_has_the_metric() -> None:
    config, earlier = SelectionConfig(metric=OWN_LOSS, patience=3), history_of([0.5] * 10)
    assert not is_over(earlier, config)
    assert not is_over(earlier + history_of([math.nan] * 2, OWN_LOSS), config)
    assert is_over(earlier + history_of([math.nan] * 3, OWN_LOSS), config)
    assert not is_over(earlier + history_of([0.5, 0.6, 0.7], OWN_LOSS), config)
    assert is_over(earlier + history_of([0.5, 0.6, 0.7, 0.8], OWN_LOSS), config)


def test_without_a_metric_nothing_is_compared() -> None:
    config = SelectionConfig()
    history = history_of([0.5, 0.6, 0.7])
    assert best_of(history, config) is None
    assert not is_over(history, config)
    assert described(history, config, 3) == {}


def test_the_record_says_why_training_ended() -> None:
    config = SelectionConfig(metric=LOSS, patience=2)
    ended = history_of([0.5, 0.25, 0.6, 0.7])
    assert why_ended(ended[:3], config, 3) == "after all 3 epochs"
    assert described(ended, config, 9) == {
        "training_ended": "after 4 of 9 epochs: 2 in a row without a better val/loss",
        "best_metric": LOSS,
        "best_epoch": "2",
        "best_value": "0.25",
    }


@pytest.fixture
def checkpoints(tmp_path: Path, tiny_model: keras.Model, one_rank: Any) -> Checkpoints:
    config = SelectionConfig(metric=LOSS)
    initial = TrainingState(0, 0, 0, 16, "run", "data", [])
    exchange = make_exchange(load("smoke"), one_rank)
    return Checkpoints(
        tmp_path, initial, tiny_model.variables, exchange, one_rank, lambda history: best_step(history, config, 4)
    )


def test_the_checkpoint_of_the_best_epoch_is_kept_and_the_one_before_it_is_not(checkpoints: Checkpoints) -> None:
    values = [0.9, 0.3, 0.6, 0.7, 0.2, 0.5, 0.4]
    kept = {1: [1], 2: [1, 2], 3: [2, 3], 4: [2, 3, 4], 5: [4, 5], 6: [5, 6], 7: [5, 6, 7]}
    for epoch in range(1, 8):
        for variable in checkpoints.variables:
            variable.assign(tf.fill(variable.shape, tf.cast(epoch, variable.dtype)))
        answers = Predictions(np.array([[epoch / 10]]), np.ones((1, 1), np.uint8), np.zeros(1, int), "multi_label")
        evaluations = {"val": Evaluation({}, [], answers)}
        checkpoints.save(epochs_done=epoch, step=4 * epoch, history=history_of(values[:epoch]), evaluations=evaluations)
        found = [int(path.stem.removeprefix("step-")) // 4 for path in list_checkpoints(checkpoints.folder)]
        assert found == kept[epoch], epoch
    checkpoints.take_best(20)
    assert checkpoints.thresholds(20) == {"val": [pytest.approx(0.25)]}, "half of what the only sample has"
    assert checkpoints.thresholds(4) == {}, "that checkpoint is gone"
    assert all((np.array(variable) == 5).all() for variable in checkpoints.variables)
    # The count goes on where it was: it is in the newest checkpoint's history.
    state = newest_state(checkpoints.folder)[1]
    assert is_over(state.history, SelectionConfig(metric=LOSS, patience=2))
    assert not is_over(state.history, SelectionConfig(metric=LOSS, patience=3))


def test_a_damaged_best_checkpoint_says_what_to_do(checkpoints: Checkpoints) -> None:
    checkpoints.save(epochs_done=1, step=4, history=history_of([0.5]))
    path = checkpoint_path(checkpoints.folder, 4)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(RuntimeError, match=r"best epoch, is damaged .*training\.selection\.model=last and training\."):
        checkpoints.take_best(4)


def manifest(task: Task, classes: int, *, validated: bool = True) -> Manifest:
    split = {"shards": (), "class_counts": (0,) * classes}
    return Manifest(
        archive="image_folder",
        task=task,
        class_names=tuple(f"class {number}" for number in range(classes)),
        groups=(),
        splits={name: split for name in ("train", "validation") if validated or name == "train"},
        statistics={},
        settings={},
        source_fingerprint="abc",
    )


def test_a_metric_that_validation_does_not_have_is_refused_with_those_that_it_has() -> None:
    _check_selection(load("smoke", ["training.selection.metric=val/f1_micro"]), manifest("multi_label", 3))
    with pytest.raises(
        ValueError,
        match=r"metric=val/f1_micro should be one of val/loss, val/top_1, val/f1_macro, val/mean_average_precision$",
    ):
        _check_selection(load("smoke", ["training.selection.metric=val/f1_micro"]), manifest("single_label", 3))
    averaged = ["training.selection.metric=val_ema/top_5"]
    with pytest.raises(ValueError, match=r"mean_average_precision, and training\.ema is null$"):
        _check_selection(load("smoke", averaged), manifest("single_label", 6))
    _check_selection(load("smoke", [*averaged, "training.ema=0.9"]), manifest("single_label", 6))


def test_a_dataset_without_validation_has_no_best_epoch() -> None:
    config = load("smoke", ["training.selection.metric=val/loss"])
    with pytest.raises(ValueError, match=r"metric=val/loss needs a validation split, and .* has only train: leave out"):
        _check_selection(config, manifest("multi_label", 3, validated=False))


@pytest.mark.parametrize("key", ["patience=5", "min_delta=0.1", "model=last"])
def test_settings_without_a_metric_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"training\.selection\.{key} has no effect without training\.selection\.met"):
        load("smoke", [f"training.selection.{key}"])


def test_a_resumed_run_needs_the_checkpoint_of_its_best_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = manifest("multi_label", 3)
    rows = {"shards": ({"file": "a", "row_groups": (32,), "size": 1},), "class_counts": (0, 0, 0)}
    dataset = Manifest.model_validate(dataset.model_dump() | {"splits": {"train": rows}})
    state = TrainingState(3, 12, 0, 8, "run", "data", history_of([0.5, 0.25, 0.75]))
    settings = ["training.resume_run=run", "training.selection.metric=val/loss", "training.epochs=9"]
    monkeypatch.setattr("pipelines.tracking.runs.is_finished", lambda run_id: True)
    newest = checkpoint_path(tmp_path, 12)
    with pytest.raises(ValueError, match=r"the best epoch is that of .*step-00000008.npz, which is not there: set "):
        _check_best(newest, state, load("smoke", settings), dataset)
    _check_best(newest, state, load("smoke", [*settings, "training.selection.model=last"]), dataset)
    checkpoint_path(tmp_path, 8).touch()
    _check_best(newest, state, load("smoke", [*settings, "training.selection.patience=2"]), dataset)
    with pytest.raises(ValueError, match=r"ended after 3 of 9 epochs: 1 in a row .* logged: raise training\.selection"):
        _check_best(newest, state, load("smoke", [*settings, "training.selection.patience=1"]), dataset)


class Reader:
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(("task", "classes"), [("multi_label", 3), ("single_label", 3), ("single_label", 6)])
def test_validation_has_the_metrics_that_can_be_chosen(
    task: Task, classes: int, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = np.eye(classes, dtype=np.uint8)[np.arange(8) % classes]
    batch = Batch({}, targets, np.ones(8, np.float32), np.arange(8))
    monkeypatch.setattr(evaluation, "evaluation_batches", lambda *args, **kwargs: [batch])
    found = evaluation.evaluate(
        lambda images: tf.constant(targets, tf.float32),
        lambda t, z: tf.reduce_mean(z, -1),
        Reader(),
        one_rank,
        batch_size=8,
        class_names=[f"class {number}" for number in range(classes)],
        task=task,
    )
    names = validation_metrics(task, classes, averaged=True)
    assert {f"{group}/{name}" for group in ("val", "val_ema") for name in found.metrics} == set(names)
    assert {*names} <= described_metrics().keys()
