"""From where a run continues, and when it refuses to; ranks that really die are in `tests/parallel`."""

import gc
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
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.checkpoints import Checkpoints
from pipelines.training.checkpoint.files import list_checkpoints
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.setup.recipe import make_exchange
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

    # CPython 3.11 mixes up `ast.parse` of two threads, which `np.load` calls, if the collector lets another one run.
    gc.disable()
    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(call, rank) for rank in range(size)]
    finally:
        gc.enable()
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


@pytest.fixture
def weight() -> keras.Variable:
    """All that is trained."""
    return keras.Variable(np.full((2, 3), 0.5, np.float32), name="weight")


@pytest.fixture
def checkpoints(tmp_path: Path, weight: keras.Variable) -> Callable[..., Checkpoints]:
    def make(order: str = ANY_ROW) -> Checkpoints:
        initial, collective = TrainingState(0, 0, 0, 16, "run", "data", [], order=order), Ranks()
        exchange = make_exchange(load("smoke"), collective)  # type: ignore[arg-type]
        return Checkpoints(Location.at(tmp_path), initial, [weight], exchange, collective)  # type: ignore[arg-type]

    return make


WITHIN = TrainingState(1, 9, 0, 16, "run", "data", [{}], loss_sum=3.0, loss_count=2, order=ANY_ROW)
AT_THE_END = TrainingState(1, 7, 0, 16, "run", "data", [{}], order=ANY_ROW)


@pytest.mark.parametrize(
    ("saved", "order"),
    # Within an epoch the order is the same; what is written from an epoch's end on may be of a new one.
    [(WITHIN, ANY_ROW), *((AT_THE_END, order) for order in OTHER_ORDERS)],
)
def test_it_goes_on_where_the_order_allows_it(
    checkpoints: Callable[..., Checkpoints], weight: keras.Variable, saved: TrainingState, order: str
) -> None:
    checkpoints().save(saved)
    weight.assign(np.zeros((2, 3)))
    assert checkpoints(order).restore(resumes=True) == saved
    np.testing.assert_array_equal(weight, 0.5)


@pytest.mark.parametrize("order", OTHER_ORDERS)
def test_another_order_within_an_epoch_is_refused_and_changes_nothing(
    checkpoints: Callable[..., Checkpoints], weight: keras.Variable, order: str
) -> None:
    checkpoints().save(WITHIN)
    weight.assign(np.full((2, 3), 0.25))
    with pytest.raises(
        ValueError, match=rf"within an epoch of {ANY_ROW}, now it is {order}: set reader\.name and reader\.cache_limit"
    ):
        checkpoints(order).restore(resumes=True)
    np.testing.assert_array_equal(weight, 0.25)


def test_a_first_attempt_takes_no_checkpoint_that_lies_there(checkpoints: Callable[..., Checkpoints]) -> None:
    checkpoints().save(AT_THE_END)
    assert checkpoints().restore(resumes=False).step == 0


def test_a_further_attempt_before_any_checkpoint_starts_anew(
    checkpoints: Callable[..., Checkpoints], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GROUNDSWELL_ATTEMPT", "2")
    assert checkpoints().restore(resumes=False).step == 0
    assert "no checkpoint was written before the failure: attempt 2 starts from the beginning\n" in caplog.text
    with pytest.raises(FileNotFoundError):  # a run that must go on needs one
        checkpoints().restore(resumes=True)


def with_exchange(folder: Path, ranks: Ranks, codec: str = "onebit", **state: Any) -> Checkpoints:
    """Checkpoints of a run without variables, whose exchange keeps a residual of one tensor."""
    exchange = make_exchange(resolve("smoke", [f"exchange.codec={codec}", "exchange.dense_below=0"]), ranks)  # type: ignore[arg-type]
    exchange.build([tf.zeros((4, 6))])
    initial = TrainingState(0, 0, 0, 16, "run", "data", [], **state)
    return Checkpoints(Location.at(folder), initial, [], exchange, ranks)  # type: ignore[arg-type]


def residual(checkpoints: Checkpoints) -> tf.Variable:
    return next(entry.variable for entry in checkpoints.exchange.state if entry.name.startswith("residual"))


def save_on(size: int, folder: Path, *steps: int) -> None:
    """Write checkpoints in which the residual of rank r is 10 * step + r."""

    def run(ranks: Ranks) -> None:
        checkpoints = with_exchange(folder, ranks)
        for step in steps:
            residual(checkpoints).assign(tf.fill((4, 6), 10.0 * step + ranks.rank))
            checkpoints.save(TrainingState(step, step, 0, 16, "run", "data", []))

    on_each_rank(size, run)


def restored_on(size: int, folder: Path) -> list[tuple[int, float]]:
    """Step and residual of each rank after it was restored."""

    def run(ranks: Ranks) -> tuple[int, float]:
        checkpoints = with_exchange(folder, ranks)
        return checkpoints.restore(resumes=True).step, float(residual(checkpoints)[0, 0])

    return on_each_rank(size, run)


PARTS = [f"step-00000001.rank-{rank:05d}.npz" for rank in range(4)]


@pytest.mark.parametrize(
    ("size", "residuals", "read"),
    [
        (4, [10.0, 11.0, 12.0, 13.0], PARTS),  # each reads its own state only
        (2, [11.5] * 2, [*PARTS, *PARTS]),  # the mean of 10, 11, 12, 13: each reads every state once
    ],
)
def test_each_rank_reads_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, residuals: list[float], read: list[str]
) -> None:
    save_on(4, tmp_path, 1)
    opened, original = [], np.load
    monkeypatch.setattr(
        np, "load", lambda file, **rest: (opened.append(Path(file.name).name), original(file, **rest))[1]
    )
    assert restored_on(size, tmp_path) == [(1, residual) for residual in residuals]
    # Rank 0 reads the checkpoint too.
    assert sorted(opened) == sorted(["step-00000001.npz", *read])


def make_not_finite(path: Path) -> None:
    with np.load(path) as file:
        np.savez(path, **{name: file[name] * np.float32(np.nan) for name in file.files})


@pytest.mark.parametrize(
    "harm", [Path.unlink, lambda path: os.truncate(path, 100), make_not_finite], ids=["missing", "short", "not finite"]
)
def test_a_checkpoint_that_one_rank_cannot_use_is_passed_over_by_all(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save_on(2, tmp_path, 1, 2)
    harm(tmp_path / "step-00000002.rank-00001.npz")
    assert restored_on(2, tmp_path) == [(1, 10.0), (1, 11.0)]
    assert "step-00000002.npz is damaged (step-00000002.rank-00001.npz:" in caplog.text


def test_what_a_codec_left_is_forgotten_where_only_a_checkpoint_without_a_codec_is_good(tmp_path: Path) -> None:
    with_exchange(tmp_path, Ranks(), codec="none").save(TrainingState(1, 1, 0, 16, "run", "data", []))
    save_on(2, tmp_path, 2)
    (tmp_path / "step-00000002.rank-00001.npz").unlink()
    assert restored_on(2, tmp_path) == [(1, 0.0), (1, 0.0)]


def test_a_residual_that_is_not_finite_stops_with_rank_and_step(tmp_path: Path) -> None:
    def run(ranks: Ranks) -> None:
        checkpoints = with_exchange(tmp_path, ranks)
        if ranks.rank == 1:
            residual(checkpoints).assign(tf.fill((4, 6), np.inf))
        checkpoints.save(TrainingState(2, 8, 0, 16, "run", "data", []))

    save_on(2, tmp_path, 4)
    with pytest.raises(
        FloatingPointError,
        match=r"residual/gradient_0 is not finite on rank 1 after step 8: lower the learning rate",
    ):
        on_each_rank(2, run)
    assert [path.name for path in list_checkpoints(Location.at(tmp_path))] == ["step-00000004.npz"]


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
    for step, said in ((2, f"^{re.escape(message)}$"), (1, "No space left")):  # 1: as after a resume from a stop there
        with pytest.raises(RuntimeError, match=said):
            save_on(1, tmp_path, step)
    assert (restored_on(1, tmp_path), sorted(path.name for path in tmp_path.iterdir())) == (
        [(1, 10.0)],
        ["step-00000001.npz", "step-00000001.rank-00000.npz"],
    )


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
    checkpoints = with_exchange(tmp_path / "file" / "checkpoints", Ranks())
    with pytest.raises(RuntimeError, match=r"cannot write to .*/file/checkpoints \(Not a directory\)"):
        checkpoints.check_folder()


def test_what_a_codec_left_to_send_is_not_dropped(tmp_path: Path) -> None:
    save_on(1, tmp_path, 1)
    with pytest.raises(ValueError, match=r"exchange\.codec=none would lose it: set exchange\.codec as it was"):
        with_exchange(tmp_path, Ranks(), codec="none").restore(resumes=True)


@pytest.mark.parametrize(
    "settings",
    [{"codec": "{name: qsgd, bits: 4}", "micro_batches": 2}, {"codec": "onebit", "micro_batches": 2}, {"ema": 0.75}],
)
def test_a_repeated_and_a_resumed_training_have_equal_bits(
    make_training: Callable[..., Any], images: dict[str, np.ndarray], targets: np.ndarray, settings: dict[str, Any]
) -> None:
    whole, again, resumed = (make_training(**settings) for _ in range(3))
    for step in range(4):
        assert whole.step(images, targets, step) == again.step(images, targets, step)
        if step == 1:
            again.checkpoints.save(TrainingState(0, 2, 0, 16, "run", "data", [], loss_sum=1.0, loss_count=2))
    assert resumed.checkpoints.restore(resumes=True).step == 2
    for step in (2, 3):
        resumed.step(images, targets, step)
    np.testing.assert_equal([again.values, resumed.values], [whole.values] * 2)
