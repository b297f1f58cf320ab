"""`training.class_weights`, from the counts of the training split or by name."""

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from conf.load import load
from pipelines.dataset.format.manifest import Manifest
from pipelines.sample import Task
from pipelines.training.setup.class_weights import class_weights
from tests.pipelines.training.manifests import rgb_manifest, split_of

NAMES = ("Arable land", "Pastures", "Inland waters")


def manifest(task: Task, rows: int, counts: tuple[int, ...]) -> Manifest:
    return rgb_manifest(task=task, class_names=NAMES).model_copy(
        update={"splits": {"train": split_of("train", rows, counts)}}
    )


@pytest.mark.parametrize("counts", [(50, 30, 20), (99, 1, 0)])
def test_balanced_weights_of_one_label_are_those_of_scikit_learn(counts: tuple[int, ...]) -> None:
    labels = np.repeat(np.arange(3), counts)
    present, expected = np.unique(labels), np.ones(3)
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pasture", r"names 'Pasture', and the dataset has no such class \(did you mean 'Pastures'"),
        ("x", r"no such class; expected one of Arable land, Pastures, Inland waters$"),
    ],
)
def test_a_class_that_the_dataset_has_not_is_refused_with_the_closest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_weights({name: 2.0}, manifest("single_label", 100, (50, 30, 20)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        *(
            (f"{{Pastures: {weight}}}", r": the weight of 'Pastures' is .*above 0$")
            for weight in ("0", "-1.0", ".inf", ".nan", "many", "true")
        ),
        *((value, "=.*: should be balanced, null or a map") for value in ("even", "{}", "[1.0, 2.0]")),
    ],
)
def test_what_is_no_weight_is_refused(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^--set training\.class_weights{message}"):
        load("smoke", [f"training.class_weights={value}"])
