import numpy as np
import pytest

from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.v2 import GROUPS
from pipelines.archives.synthetic.landscape import MINIMUM_COVER, land_cover, render
from pipelines.sample import ImageGroup

WATERS = [BIGEARTHNET_19.index(name) for name in ("Inland waters", "Marine waters")]


def test_labels_are_the_classes_of_the_map_and_none_is_small() -> None:
    for number in range(100):
        cover, labels = land_cover(0, number)
        assert cover.shape == (120, 120)
        classes, pixels = np.unique(cover, return_counts=True)
        assert labels == tuple(classes.tolist())
        assert 1 <= len(labels) <= 5
        assert pixels.min() >= MINIMUM_COVER * cover.size


def test_every_class_occurs_and_frequencies_are_uneven() -> None:
    present = np.zeros((512, len(BIGEARTHNET_19)), bool)
    for number in range(len(present)):
        present[number, list(land_cover(0, number)[1])] = True
    frequencies = present.mean(axis=0)
    assert 0 < frequencies.min() < 0.05
    assert 0.3 < frequencies.max() < 0.6
    assert 2.5 < present.sum(axis=1).mean() < 3.5


def test_a_patch_depends_on_seed_and_number_only() -> None:
    first, labels = render(3, 14, GROUPS)
    np.random.default_rng().standard_normal(5)
    again, labels_again = render(3, 14, GROUPS)
    assert labels == labels_again == land_cover(3, 14)[1]
    np.testing.assert_equal(again, first)
    for other in (render(4, 14, GROUPS)[0], render(3, 15, GROUPS)[0]):
        assert not np.array_equal(first["bands_10m"], other["bands_10m"])


def test_images_are_of_their_groups_and_without_the_missing_value() -> None:
    images, _ = render(0, 0, GROUPS)
    for group in GROUPS:
        assert (images[group.name].shape, str(images[group.name].dtype)) == (group.shape, group.dtype)
        assert 1 <= images[group.name].min() <= images[group.name].max() <= 10_000


@pytest.mark.parametrize(("group", "band"), list(zip(GROUPS, ("B08", "B8A", "B09"), strict=True)))
def test_every_resolution_follows_the_map(group: ImageGroup, band: str) -> None:
    """Infrared is dark over water and bright over land, at the same places in each group."""
    size, shores = group.shape[0], 0
    for number in range(60):
        water = np.isin(land_cover(0, number)[0], WATERS)
        share = water.reshape(size, 120 // size, size, 120 // size).mean(axis=(1, 3))
        if not ((share == 0).any() and (share == 1).any()):
            continue
        shores += 1
        image = render(0, number, (group,))[0][group.name][..., group.bands.index(band)]
        assert image[share == 1].max() < image[share == 0].min()
    assert shores >= 5
