"""Probabilities averaged over an image and its images in the mirror."""

import numpy as np
import pytest
from numpy.typing import NDArray

from conf.sections.score import EvaluateConfig
from models.layers.augmentation import Augmentation
from pipelines.sample import ImageGroup
from pipelines.scoring.predict.symmetries import COUNTS, averaged, check_symmetries

IMAGES: dict[str, NDArray[np.generic]] = {
    "fine": np.random.default_rng(0).integers(0, 255, (3, 4, 4, 2), dtype=np.uint8),
    "coarse": np.random.default_rng(1).integers(0, 9000, (3, 2, 2, 1), dtype=np.uint16),
}


@pytest.mark.parametrize(("symmetries", "count"), COUNTS.items())
def test_the_mean_is_over_the_images_that_training_draws_from(symmetries, count):
    seen = []

    def predict(images):
        seen.append(images)
        return np.stack([images["fine"].reshape(3, -1)[:, 0], images["coarse"].reshape(3, -1)[:, 0]], axis=1) / 9000

    found = averaged(predict, symmetries)(IMAGES)
    assert (found.dtype.name, len(seen)) == ("float32", count)
    layer = Augmentation("dihedral")
    for element, moved in enumerate(seen):
        drawn = layer(IMAGES, seeds=np.full(3, element, np.int32), training=True)
        for name in IMAGES:
            np.testing.assert_array_equal(moved[name], drawn[name], err_msg=f"{element} {name}")
            assert moved[name].dtype == IMAGES[name].dtype
    np.testing.assert_array_equal(seen[0]["fine"], IMAGES["fine"])
    np.testing.assert_allclose(found, np.mean([predict(each) for each in list(seen)], axis=0), rtol=1e-6)


def test_without_symmetries_it_is_the_function_itself():
    def predict(images):
        return images["fine"]

    assert averaged(predict, None) is predict


def test_the_settings_name_the_same_symmetries():
    assert [EvaluateConfig(test_time_augmentation=name).test_time_augmentation for name in COUNTS] == [*COUNTS]


def test_only_squares_are_turned():
    inputs = [
        ImageGroup("rgb", (4, 4, 3), "uint8", ("red", "green", "blue")),
        ImageGroup("wide", (4, 6, 1), "uint8", ("grey",)),
    ]
    for symmetries in (None, "mirror", "flips"):
        check_symmetries(symmetries, inputs)
    check_symmetries("dihedral", inputs[:1])
    with pytest.raises(ValueError, match=r"group 'wide' has 4 x 6 pixels, no square: choose mirror or flips"):
        check_symmetries("dihedral", inputs)
