"""From where a run continues, and when it refuses to; ranks that really die are in `tests/parallel`."""

import errno
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.load import load, resolve
from pipelines.training.checkpoint import TrainingState
from pipelines.training.checkpoint_files import list_checkpoints
from pipelines.training.recipe import make_exchange
from pipelines.training.resume import Checkpoints
from tests.patience import patient

ANY_ROW = "groundswell's reader, any row"
OTHER_ORDERS = ["groundswell's reader, windows of 64 rows", "Petastorm's reader"]


class Ranks:
    """The collective of one rank of several that run as threads."""

    def __init__(self, rank: int = 0, size: int = 1, barrier: threading.Barrier | None = None, board: Any = None):
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier or threading.Barrier(1), board if board is not None else [None]

    def _gather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait(patient(60))
        everyones = list(self._board)
        self._barrier.wait(patient(60))
        return everyones

    def broadcast(self, variables: list[tf.Variable]) -> None:
        for variable, value in zip(variables, self._gather([v.numpy() for v in variables])[0], strict=True):
            variable.assign(value)

    def broadcast_number(self, value: int) -> int:
        return int(self._gather(value)[0])

    def sum(self, values: np.ndarray) -> np.ndarray:
        return np.sum(self._gather(values), axis=0)


def on_each_rank(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """Call a function as so many ranks; the first exception is raised."""
    barrier, board = threading.Barrier(size), [None] * size

    def call(rank: int) -> Any:
        try:
            return function(Ranks(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


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
    collective = Ranks()
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
    assert "no checkpoint was written before the failure: attempt 2 starts from the beginning" in caplog.text


def test_a_run_that_must_go_on_needs_a_checkpoint(tmp_path: Path, tiny_model: keras.Model) -> None:
    with pytest.raises(FileNotFoundError):
        checkpoints(tmp_path, tiny_model, ANY_ROW).restore(resumes=True)


def with_exchange(folder: Path, ranks: Ranks, codec: str = "onebit", **state: Any) -> Checkpoints:
    """Checkpoints of a run without variables, whose exchange keeps a residual of one tensor."""
    config = resolve("smoke", [f"exchange.codec={codec}", "exchange.dense_below=0"])
    exchange = make_exchange(config, ranks)  # type: ignore[arg-type]
    exchange.build([tf.zeros((4, 6))])
    initial = TrainingState(0, 0, 0, 16, "run", "data", [], **state)
    return Checkpoints(folder, initial, [], exchange, ranks)  # type: ignore[arg-type]


def residual(checkpoints: Checkpoints) -> tf.Variable:
    return next(entry.variable for entry in checkpoints.exchange.state if entry.name.startswith("residual"))


def save_on(size: int, folder: Path, *steps: int) -> None:
    """Write checkpoints in which the residual of rank r is 10 * step + r."""

    def run(ranks: Ranks) -> None:
        checkpoints = with_exchange(folder, ranks)
        for step in steps:
            residual(checkpoints).assign(tf.fill((4, 6), 10.0 * step + ranks.rank))
            checkpoints.save(epochs_done=step, step=step, history=[])

    on_each_rank(size, run)


def restored_on(size: int, folder: Path) -> list[tuple[int, float]]:
    """Step and residual of each rank after it was restored."""

    def run(ranks: Ranks) -> tuple[int, float]:
        checkpoints = with_exchange(folder, ranks)
        state = checkpoints.restore(resumes=True)
        return state.step, float(residual(checkpoints)[0, 0])

    return on_each_rank(size, run)


def test_each_rank_reads_its_own_state_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_on(4, tmp_path, 1)
    opened = []
    original = np.load
    monkeypatch.setattr(
        np, "load", lambda file, **rest: (opened.append(Path(file.name).name), original(file, **rest))[1]
    )
    assert restored_on(4, tmp_path) == [(1, 10.0 + rank) for rank in range(4)]
    # Rank 0 reads the checkpoint too.
    assert sorted(opened) == ["step-00000001.npz", *[f"step-00000001.rank-{rank:05d}.npz" for rank in range(4)]]


def test_other_numbers_of_ranks_read_every_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_on(4, tmp_path, 1)
    opened = []
    original = np.load
    monkeypatch.setattr(
        np, "load", lambda file, **rest: (opened.append(Path(file.name).name), original(file, **rest))[1]
    )
    assert restored_on(2, tmp_path) == [(1, 11.5)] * 2  # the mean of 10, 11, 12, 13
    assert len(opened) == 2 * 4 + 1


@pytest.mark.parametrize("harm", ["missing", "truncated", "not finite"])
def test_a_checkpoint_that_one_rank_cannot_use_is_passed_over_by_all(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_on(2, tmp_path, 1, 2)
    path = tmp_path / "step-00000002.rank-00001.npz"
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(path.read_bytes()[:100])
    else:
        with np.load(path) as file:
            np.savez(path, **{name: file[name] * np.float32(np.nan) for name in file.files})
    assert restored_on(2, tmp_path) == [(1, 10.0), (1, 11.0)]
    assert "step-00000002.npz is damaged (step-00000002.rank-00001.npz:" in caplog.text


def test_what_a_codec_left_is_forgotten_where_only_a_checkpoint_without_a_codec_is_good(tmp_path: Path) -> None:
    with_exchange(tmp_path, Ranks(), codec="none").save(epochs_done=1, step=1, history=[])
    save_on(2, tmp_path, 2)
    (tmp_path / "step-00000002.rank-00001.npz").unlink()
    assert restored_on(2, tmp_path) == [(1, 0.0), (1, 0.0)]


def test_a_residual_that_is_not_finite_stops_with_rank_and_step(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        checkpoints = with_exchange(tmp_path, ranks)
        if ranks.rank == 1:
            residual(checkpoints).assign(tf.fill((4, 6), np.inf))
        checkpoints.save(epochs_done=2, step=8, history=[])

    save_on(2, tmp_path, 4)
    with pytest.raises(
        FloatingPointError,
        match=r"residual/gradient_0 is not finite on rank 1 after step 8: lower the learning rate",
    ):
        on_each_rank(2, run)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000004.npz"]


def test_a_full_disk_names_the_folder_and_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_on(1, tmp_path, 1)
    original = os.fsync

    def full(descriptor: int) -> None:
        original(descriptor)
        if "rank" not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):  # the rank's own part still fits
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = (
        f"cannot write a checkpoint to {tmp_path} (No space left on device): free some space, then continue from "
        f"{tmp_path}/step-00000001.npz with training.resume_run=run"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        save_on(1, tmp_path, 2)
    with pytest.raises(RuntimeError, match="No space left on device"):  # as after a resume from a stop at that step
        save_on(1, tmp_path, 1)
    assert restored_on(1, tmp_path) == [(1, 10.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001.npz", "step-00000001.rank-00000.npz"]


def test_ranks_that_write_to_different_disks_are_found_before_the_first_step(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        with_exchange(tmp_path / str(ranks.rank), ranks).check_folder()

    with pytest.raises(RuntimeError, match=r"rank 1 wrote elsewhere than .*/0: set training\.output to storage"):
        on_each_rank(2, run)


def test_a_folder_that_every_rank_can_use_stays_empty(tmp_path: Path) -> None:
    on_each_rank(3, lambda ranks: with_exchange(tmp_path / "run", ranks).check_folder())
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write to .*/file/checkpoints \(Not a directory\)"):
        with_exchange(tmp_path / "file" / "checkpoints", Ranks()).check_folder()


def test_a_disk_that_became_read_only_is_found_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = with_exchange(tmp_path / "checkpoints", Ranks())

    def read_only(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(RuntimeError, match=r"cannot write to .*/checkpoints \(Read-only file system\): set training"):
        checkpoints.check_folder()


def test_what_a_codec_left_to_send_is_not_dropped(tmp_path: Path) -> None:
    save_on(1, tmp_path, 1)
    with pytest.raises(ValueError, match=r"exchange\.codec=none would lose it: set exchange\.codec as it was"):
        with_exchange(tmp_path, Ranks(), codec="none").restore(resumes=True)
