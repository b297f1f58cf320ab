"""States of a rank in memory that outlives its process."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from models.compression.exchange.figures import ExchangeFigures
from pipelines.training.checkpoint.in_memory import (
    InMemoryCheckpoints,
    InMemoryRows,
    StepRow,
    position_of,
    rank_uses_kernels,
)
from pipelines.training.checkpoint.state import TrainingState


@pytest.fixture
def files() -> Iterator[list[int]]:
    opened = [os.memfd_create(f"test-{number}") for number in range(3)]
    yield opened
    for file in opened:
        os.close(file)


def state(epochs_done: int, step: int) -> TrainingState:
    return TrainingState(
        epochs_done, step, 0, 8, "run", "dataset", [{"train/loss": 0.5}] * epochs_done, loss_sum=1.5, loss_count=step
    )


def variables(number: int = 0) -> list[tf.Variable]:
    """Variables of several kinds, filled with a number."""
    shapes = (((3, 4), tf.float32), ((), tf.int64), ((0, 2), tf.float32), ((5,), tf.bfloat16))
    return [tf.Variable(tf.cast(tf.fill(shape, number), dtype)) for shape, dtype in shapes]


@pytest.mark.parametrize("uses_kernels", [True, False])
def test_the_two_latest_states_are_there_for_another_process(files: list[int], uses_kernels: bool) -> None:
    mine, states = variables(), [state(0, 0), state(0, 7), state(1, 7)]
    checkpoints = InMemoryCheckpoints(files[:2], mine)
    assert checkpoints.positions() == []
    for number, each in enumerate(states):
        for variable, value in zip(mine, variables(number), strict=True):
            variable.assign(value)
        checkpoints.write(each, uses_kernels=uses_kernels)
    others = variables()
    again = InMemoryCheckpoints(files[:2], others)
    assert again.positions() == [position_of(each) for each in states[1:]]
    for number, each in enumerate(states[1:], 1):
        assert again.restore(position_of(each)) == each
        np.testing.assert_equal([value.numpy() for value in others], [value.numpy() for value in variables(number)])
    assert rank_uses_kernels(files[:2], give_up=lambda: False) is uses_kernels


def test_a_state_that_was_cut_short_is_none(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = InMemoryCheckpoints(files[:2], variables())
    for step in (1, 2):
        checkpoints.write(state(0, step), uses_kernels=False)
    write, writes = os.pwrite, itertools.count(1)

    def dies(*arguments: Any) -> int:
        if next(writes) > 3:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write(state(0, 3), uses_kernels=False)
    assert InMemoryCheckpoints(files[:2], variables()).positions() == [position_of(state(0, 2))]


@pytest.mark.parametrize(("every", "first", "epoch"), [(1, 0, 9), (3, 0, 9), (4, 0, 6), (3, 2, 7)])
def test_ranks_that_train_alone_always_have_states_of_one_block(
    files: list[int], monkeypatch: pytest.MonkeyPatch, every: int, first: int, epoch: int
) -> None:
    """Whatever each of two ranks does when the other one dies, also while it writes a state."""

    def block(step: int) -> int:  # by counting, in place of the formula
        return max(at for at in range(step + 1) if at <= first or at % every == 0 or at % epoch == 0)

    steps, checkpoints = 14, InMemoryCheckpoints(files[:2], variables(), block)
    whole, cut = [], []
    for step in range(steps):
        head = os.pread(unfinished := checkpoints._file_for(position_of(state(0, step))), 16, 0)
        os.pwrite(unfinished, bytes(16), 0)
        cut.append({block(position) for position in checkpoints.positions()})
        os.pwrite(unfinished, head, 0)
        checkpoints.write(state(0, step), uses_kernels=False)
        whole.append({block(position) for position in checkpoints.positions()})
    for ahead in range(1, steps):
        for behind in range(max(block(ahead) - 1, 0), ahead + 1):  # it took part in the last exchange
            for mine in (whole[ahead], cut[ahead] if ahead > behind else whole[ahead]):
                for others in (whole[behind], *cut[behind + 1 : ahead + 1][:1]):
                    assert mine & others or behind == 0, (ahead, behind)


def test_nobody_waits_for_facts_that_will_not_come(files: list[int]) -> None:
    assert rank_uses_kernels(files[:2], give_up=lambda: True) is None


def test_rows_outlive_their_writer_and_are_forgotten_by_step(files: list[int]) -> None:
    rows = InMemoryRows(files[2])
    for step in range(5):
        rows.append(StepRow(step, step / 2, 1000 + step, ExchangeFigures(*np.arange(6.0) + step)))
    os.ftruncate(files[2], os.fstat(files[2]).st_size - 3)  # the last one was cut short
    assert InMemoryRows(files[2]).read() == [
        (step, step / 2, 1000 + step, tuple(np.arange(6.0) + step)) for step in range(4)
    ]
    rows.trim(1, 3)
    rows.append(StepRow(9, 0.0, 0, ExchangeFigures(*np.zeros(6))))
    assert [row.step for row in rows.read()] == [1, 2, 9]
