import numpy as np
import pytest

from pipelines.archives.stratified import check_split, split_counts, stratified_split

FRACTIONS = (0.7, 0.15, 0.15)


@pytest.mark.parametrize(
    ("total", "fractions", "expected"),
    [
        (0, FRACTIONS, [0, 0, 0]),
        (1, FRACTIONS, [1, 0, 0]),  # 0.7, 0.15, 0.15: one left for the largest
        (2, FRACTIONS, [2, 0, 0]),  # 1 + 0.4, 0.3, 0.3
        (3, FRACTIONS, [1, 1, 1]),  # 2 + 0.1, 0.45, 0.45 is 2, 1, 0; then one for the empty split
        (10, FRACTIONS, [7, 2, 1]),  # remainders 0, 0.5, 0.5: the earlier split
        (20, FRACTIONS, [14, 3, 3]),
        (3000, FRACTIONS, [2100, 450, 450]),
        (100, (0.29, 0.71), [29, 71]),  # 0.29 * 100 is 28.999999999999996 in floating point
        (5, (1.0, 0.0, 0.0), [5, 0, 0]),  # a split of fraction 0 stays empty
        (50, (0.98, 0.01, 0.01), [48, 1, 1]),  # 49, 0.5, 0.5 is 49, 1, 0
        (10, (0.9, 0.1), [9, 1]),
        (2, (0.95, 0.05), [1, 1]),
    ],
)
def test_counts_by_largest_remainder(total: int, fractions: tuple[float, ...], expected: list[int]) -> None:
    assert split_counts(total, fractions) == expected


def test_every_class_is_divided_alike() -> None:
    classes = np.repeat([0, 1, 4], [20, 3, 200])
    splits = stratified_split([str(n) for n in range(len(classes))], classes, FRACTIONS, 0)
    assert {label: np.bincount(splits[classes == label], minlength=3).tolist() for label in (0, 1, 4)} == {
        0: [14, 3, 3],
        1: [1, 1, 1],
        4: [140, 30, 30],
    }


def test_order_and_other_classes_do_not_matter_but_the_seed_does() -> None:
    keys, classes = [f"image {n}" for n in range(300)], np.arange(300) % 3
    splits, shuffled = stratified_split(keys, classes, FRACTIONS, 5), np.random.default_rng(0).permutation(300)
    again = stratified_split([keys[n] for n in shuffled], classes[shuffled], FRACTIONS, 5)
    assert again.tolist() == splits[shuffled].tolist()
    alone = stratified_split([keys[n] for n in range(0, 300, 3)], np.zeros(100, int), FRACTIONS, 5)
    assert alone.tolist() == splits[::3].tolist()
    assert stratified_split(keys, classes, FRACTIONS, 6).tolist() != splits.tolist()


def test_a_further_file_moves_few_others() -> None:
    keys = [str(n) for n in range(201)]
    before = stratified_split(keys[:200], np.zeros(200, int), FRACTIONS, 0)
    after = stratified_split(keys, np.zeros(201, int), FRACTIONS, 0)
    assert np.count_nonzero(before != after[:200]) <= 2  # one at each of the two cuts


def test_no_samples() -> None:
    assert stratified_split([], np.empty(0, int), FRACTIONS, 0).tolist() == []


@pytest.mark.parametrize(
    "fractions", [(0.5, 0.5), (0.5, 0.3, 0.1), (1.2, -0.1, -0.1), (0.0, 0.5, 0.5), (float("nan"), 0.5, 0.5), ()]
)
def test_fractions_that_are_none(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"split_fractions is .*, expected three numbers for train, validation, test"):
        check_split(fractions)


def test_fractions_become_a_tuple() -> None:
    assert check_split([0.8, 0.2, 0.0]) == (0.8, 0.2, 0.0)
