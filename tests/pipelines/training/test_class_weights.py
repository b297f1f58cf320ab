"""`training.class_weights`, from the counts of the training split or by name."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from conf.load import load
from pipelines.dataset.manifest import Manifest, Shard, Split
from pipelines.sample import Task
from pipelines.training.class_weights import class_weights

NAMES = ("Arable land", "Pastures", "Inland waters")


def manifest(task: Task, rows: int, counts: tuple[int, ...]) -> Manifest:
    shard = Shard(file="train/part-00000.parquet", row_groups=(rows,), size=1)
    return Manifest(
        archive="image_folder",
        task=task,
        class_names=NAMES,
        groups=(),
        splits={"train": Split(shards=(shard,), class_counts=counts)},
        statistics={},
        settings={},
        source_fingerprint="abc",
    )


@pytest.mark.parametrize("counts", [(50, 30, 20), (99, 1, 0)])
def test_balanced_weights_of_one_label_are_those_of_scikit_learn(counts: tuple[int, ...]) -> None:
    labels = np.repeat(np.arange(3), counts)
    present = np.unique(labels)
    expected = np.ones(3)
    expected[present] = compute_class_weight("balanced", classes=present, y=labels)
    found = class_weights("balanced", manifest("single_label", 100, counts))
    np.testing.assert_allclose(found, expected)
    # The samples' mean weight is 1, so that the learning rate keeps its meaning.
    assert np.asarray(found)[labels].mean() == pytest.approx(1.0)


def test_balanced_weights_of_several_labels_are_negatives_per_positive() -> None:
    found = class_weights("balanced", manifest("multi_label", 100, (50, 20, 0)))
    assert found == [1.0, 4.0, 1.0]  # no sample has the last class: its weight is never used
    with pytest.raises(ValueError, match=r"would give 'Pastures', which all 100 training samples have, the weight 0"):
        class_weights("balanced", manifest("multi_label", 100, (50, 100, 0)))


def test_weights_by_name_leave_the_others_at_one() -> None:
    setting = load("smoke", ["training.class_weights={Pastures: 2.5, Inland waters: 3}"]).training.class_weights
    assert class_weights(setting, manifest("multi_label", 100, (50, 20, 0))) == [1.0, 2.5, 3.0]
    assert class_weights(None, manifest("multi_label", 100, (50, 20, 0))) is None


def test_a_class_that_the_dataset_has_not_is_refused_with_the_closest() -> None:
    data = manifest("single_label", 100, (50, 30, 20))
    with pytest.raises(
        ValueError, match=r"names 'Pasture', and the dataset has no such class \(did you mean 'Pastures'"
    ):
        class_weights({"Pasture": 2.0}, data)
    with pytest.raises(ValueError, match=r"no such class; expected one of Arable land, Pastures, Inland waters$"):
        class_weights({"x": 2.0}, data)


@pytest.mark.parametrize("weight", ["0", "-1.0", ".inf", ".nan", "many", "true"])
def test_what_is_no_weight_is_refused(weight: str) -> None:
    with pytest.raises(
        ValueError, match=r"^config smoke: training\.class_weights: the weight of 'Pastures' is .*above 0$"
    ):
        load("smoke", [f"training.class_weights={{Pastures: {weight}}}"])


@pytest.mark.parametrize("value", ["even", "{}", "[1.0, 2.0]"])
def test_what_has_no_class_names_is_refused(value: str) -> None:
    with pytest.raises(
        ValueError, match=r"^config smoke: training\.class_weights=.*: should be balanced, null or a map"
    ):
        load("smoke", [f"training.class_weights={value}"])
