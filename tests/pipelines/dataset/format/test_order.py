import numpy as np
import pytest

from pipelines.dataset.format.order import epoch_order, evaluation_parts, rank_parts, steps_per_epoch

GROUPS = [30, 30, 30, 7, 30, 3]
ROWS = sum(GROUPS)


@pytest.mark.parametrize("window_rows", [None, 30, 70, 1000])
def test_an_epoch_is_one_permutation_of_all_rows(window_rows: int | None) -> None:
    order = epoch_order(GROUPS, seed=0, epoch=1, window_rows=window_rows)
    assert sorted(order) == list(range(ROWS))
    np.testing.assert_array_equal(order, epoch_order(GROUPS, seed=0, epoch=1, window_rows=window_rows))
    assert (order != epoch_order(GROUPS, seed=0, epoch=0, window_rows=window_rows)).any()
    assert (order != epoch_order(GROUPS, seed=1, epoch=1, window_rows=window_rows)).any()


def test_seed_0_is_a_seed() -> None:
    assert (epoch_order([1000], seed=0, epoch=0) != np.arange(1000)).any()


def test_a_window_holds_whole_row_groups_and_no_more_rows_than_it_may() -> None:
    order = epoch_order(GROUPS, seed=3, epoch=0, window_rows=60)
    group_of = np.repeat(np.arange(len(GROUPS)), GROUPS)[order]
    spans = {group: np.flatnonzero(group_of == group) for group in range(len(GROUPS))}
    # No row group is met again once 60 rows after its first have passed.
    assert all(places[-1] - places[0] < 60 for places in spans.values())
    # And windows are shuffled over their groups: some group is interrupted by another.
    assert any(len(set(group_of[places[0] : places[-1] + 1])) > 1 for places in spans.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(size: int) -> None:
    order = epoch_order(GROUPS, seed=0, epoch=0)
    parts = [rank_parts(order, global_batch_size=12, rank=rank, size=size, start_step=0) for rank in range(size)]
    assert {len(part) for part in parts} == {steps_per_epoch(ROWS, 12)} == {ROWS // 12}
    for step in range(ROWS // 12):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), order[12 * step : 12 * step + 12])


def test_every_sample_comes_at_most_once_and_the_tail_differs_between_epochs() -> None:
    tails = []
    for epoch in range(3):
        order = epoch_order(GROUPS, seed=0, epoch=epoch)
        seen = np.concatenate(rank_parts(order, global_batch_size=48, rank=0, size=1, start_step=0))
        assert len(set(seen.tolist())) == len(seen) == ROWS // 48 * 48
        tails.append(frozenset(range(ROWS)) - set(seen.tolist()))
    assert all(len(tail) < 48 for tail in tails)
    assert len(set(tails)) == 3


def test_resuming_on_another_number_of_ranks_goes_on_with_the_same_batches() -> None:
    order = epoch_order(GROUPS, seed=0, epoch=0)
    before = rank_parts(order, global_batch_size=12, rank=0, size=1, start_step=0)
    after = [rank_parts(order, global_batch_size=12, rank=rank, size=3, start_step=4) for rank in range(3)]
    for step, whole in enumerate(before[4:]):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in after]), whole)


@pytest.mark.parametrize(
    ("size", "micro_batches", "among"), [(5, 1, "5 ranks"), (2, 5, "2 ranks, 5 micro-batches each")]
)
def test_ranks_and_micro_batches_that_do_not_divide_the_batch_are_refused(
    size: int, micro_batches: int, among: str
) -> None:
    with pytest.raises(ValueError, match=f"global batch of 12 does not divide among {among}"):
        rank_parts(np.arange(30), global_batch_size=12, rank=0, size=size, start_step=0, micro_batches=micro_batches)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_evaluation_has_every_row_once(rows: int, size: int) -> None:
    parts = [part for rank in range(size) for part in evaluation_parts(rows, batch_size=4, rank=rank, size=size)]
    assert [row for part in parts for row in part] == list(range(rows))
    assert all(0 < len(part) <= 4 for part in parts)


@pytest.mark.parametrize(("size", "micro_batches"), [(1, 4), (2, 2), (4, 1)])
def test_micro_batches_are_the_parts_of_as_many_more_ranks(size: int, micro_batches: int) -> None:
    order = epoch_order([50], seed=1, epoch=0)
    ranks = [rank_parts(order, global_batch_size=12, rank=rank, size=4, start_step=1) for rank in range(4)]
    for rank in range(size):
        parts = rank_parts(order, global_batch_size=12, rank=rank, size=size, start_step=1, micro_batches=micro_batches)
        expected = [ranks[rank * micro_batches + j][step] for step in range(3) for j in range(micro_batches)]
        assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
