"""Where a run goes on, and where it refuses to; ranks that really die are in `tests/parallel`."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load
from pipelines.training.checkpoint import TrainingState
from pipelines.training.recipe import make_exchange
from pipelines.training.resume import Checkpoints

ANY_ROW = "groundswell's reader, any row"
OTHER_ORDERS = ["groundswell's reader, windows of 64 rows", "Petastorm's reader"]


class OneRank:
    rank, size = 0, 1

    def broadcast(self, variables: list[tf.Variable]) -> None:
        pass

    def broadcast_number(self, value: int) -> int:
        return value


def checkpoints(folder: Path, model: keras.Model, order: str) -> Checkpoints:
    initial = TrainingState(
        epochs_done=0,
        step=0,
        seed=0,
        global_batch_size=16,
        run_id="run",
        dataset_fingerprint="data",
        history=[],
        order=order,
    )
    collective = OneRank()
    return Checkpoints(folder, initial, model.variables, make_exchange(load("smoke"), collective), collective)  # type: ignore[arg-type]


def set_all(model: keras.Model, value: float) -> None:
    for variable in model.variables:
        variable.assign(np.full(variable.shape, value, variable.dtype))


def test_it_goes_on_within_an_epoch_with_the_same_order(tmp_path: Path, tiny_model: keras.Model) -> None:
    set_all(tiny_model, 0.5)
    checkpoints(tmp_path, tiny_model, ANY_ROW).save(epochs_done=1, step=9, history=[{}], loss_sum=3.0, loss_count=2)
    set_all(tiny_model, 0.0)
    state = checkpoints(tmp_path, tiny_model, ANY_ROW).restore(resumes=True)
    assert (state.epochs_done, state.step, state.loss_sum, state.loss_count) == (1, 9, 3.0, 2)
    assert all((np.asarray(variable) == 0.5).all() for variable in tiny_model.variables)


@pytest.mark.parametrize("order", OTHER_ORDERS)
def test_another_order_within_an_epoch_is_refused_and_changes_nothing(
    tmp_path: Path, tiny_model: keras.Model, order: str
) -> None:
    checkpoints(tmp_path, tiny_model, ANY_ROW).save(epochs_done=1, step=9, history=[{}], loss_sum=3.0, loss_count=2)
    set_all(tiny_model, 0.25)
    with pytest.raises(
        ValueError, match=rf"within an epoch of {ANY_ROW}, now it is {order}: set reader\.name and reader\.cache_limit"
    ):
        checkpoints(tmp_path, tiny_model, order).restore(resumes=True)
    assert all((np.asarray(variable) == 0.25).all() for variable in tiny_model.variables)


@pytest.mark.parametrize("order", OTHER_ORDERS)
def test_another_order_from_an_epochs_end_on_is_allowed(tmp_path: Path, tiny_model: keras.Model, order: str) -> None:
    set_all(tiny_model, 0.5)
    checkpoints(tmp_path, tiny_model, ANY_ROW).save(epochs_done=1, step=7, history=[{}])
    set_all(tiny_model, 0.0)
    state = checkpoints(tmp_path, tiny_model, order).restore(resumes=True)
    # What is written from here on is of the new order.
    assert (state.epochs_done, state.step) == (1, 7)
    assert all((np.asarray(variable) == 0.5).all() for variable in tiny_model.variables)


def test_a_first_attempt_takes_no_checkpoint_that_lies_there(tmp_path: Path, tiny_model: keras.Model) -> None:
    checkpoints(tmp_path, tiny_model, ANY_ROW).save(epochs_done=1, step=7, history=[{}])
    assert checkpoints(tmp_path, tiny_model, ANY_ROW).restore(resumes=False).step == 0


def test_a_further_attempt_before_any_checkpoint_starts_anew(
    tmp_path: Path, tiny_model: keras.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GROUNDSWELL_ATTEMPT", "2")
    assert checkpoints(tmp_path, tiny_model, ANY_ROW).restore(resumes=False).step == 0
    assert "no checkpoint was written before the failure: attempt 2 starts anew" in caplog.text


def test_a_run_that_must_go_on_needs_a_checkpoint(tmp_path: Path, tiny_model: keras.Model) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoints(tmp_path, tiny_model, ANY_ROW).restore(resumes=True)
