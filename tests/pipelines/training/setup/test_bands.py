"""Which bands of a dataset the network sees."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest

from conf.load import load
from models.networks.model import inputs_of, with_probabilities
from pipelines.dataset.format.manifest import BandStatistics, Manifest
from pipelines.sample import ImageGroup
from pipelines.training.driver.checks import _check_model_input
from pipelines.training.setup.bands import band_channels, seen_bands, used_groups
from pipelines.training.setup.recipe import make_model
from pipelines.training.step.step import make_predict

GROUPS = (
    ImageGroup("bands_10m", (32, 32, 4), "uint16", ("B02", "B03", "B04", "B08")),
    ImageGroup("bands_20m", (16, 16, 2), "uint16", ("B05", "B06")),
    ImageGroup("sentinel1", (32, 32, 2), "float32", ("VV", "VH")),
)
MANIFEST = Manifest(
    archive="bigearthnet_v2",
    task="multi_label",
    class_names=("water", "land", "forest"),
    groups=GROUPS,
    splits={},
    statistics={
        group.name: BandStatistics(mean=tuple(10.0 * i for i in range(len(group.bands))), std=(5.0,) * len(group.bands))
        for group in GROUPS
    },
    settings={},
    read_settings={},
    source_fingerprint="abc",
)
SMALL = "model={name: resnet, depth: 18, width_factor: 0.125}"


def test_channels_are_in_the_order_of_the_setting_or_of_the_dataset() -> None:
    chosen = ["B05", "B04"]
    assert [band_channels(GROUPS, bands) for bands in (None, [*chosen, "B02"])] == [
        {"bands_10m": (0, 1, 2, 3), "bands_20m": (4, 5), "sentinel1": (6, 7)},
        {"bands_10m": (2, None, 1, None), "bands_20m": (0, None), "sentinel1": (None, None)},
    ]
    whole = ["B02", "B03", "B04", "B08", "B05", "B06", "VV", "VH"]
    assert (
        [seen_bands(GROUPS, bands) for bands in (chosen, None)],
        [group.name for group in used_groups(GROUPS, chosen)],
    ) == ([chosen, whole], ["bands_10m", "bands_20m"])


def test_a_band_that_the_dataset_has_twice_is_refused() -> None:
    twice = (*GROUPS, ImageGroup("again", (32, 32, 1), "uint8", ("B02",)))
    with pytest.raises(ValueError, match=r"^input\.bands=B02: the dataset has 2 bands of this name; it has "):
        band_channels(twice, ["B02"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["bands=[B02, B8A]"],
            r"bands=B8A: the dataset has no band of this name; it has B02, B03, B04, B08, B05, B06, VV, VH$",
        ),
        # Crops look at the groups that are used.
        (["augmentation={name: pad_crop, padding: 3}", "bands=[B02, VV]"], ""),
        (
            ["augmentation={name: pad_crop, padding: 3}"],
            r"augmentation\.padding=3 does not fit datasets/smoke: one pixel of group 'bands_20m' covers 2 x",
        ),
        (
            ["augmentation={name: pad_crop, cutout: 33}", "bands=[B02]"],
            r"augmentation\.cutout=33 does not fit .* larger than the images, 32",
        ),
    ],
)
def test_bands_and_crops_that_the_dataset_has_not_are_refused(settings: list[str], message: str) -> None:
    config = load("smoke", [f"input.{setting}" for setting in settings])
    with pytest.raises(ValueError, match=rf"^input\.{message}") if message else nullcontext():
        _check_model_input(config.dataset.path, config.input, config.model, MANIFEST)


def test_the_model_sees_the_chosen_bands_of_whole_groups_and_serves_so() -> None:
    keras.utils.set_random_seed(0)
    model = make_model(load("smoke", [SMALL, "input.bands=[B05, B04]", "input.augmentation=flips"]), MANIFEST)
    assert {name: tensor.shape[1:] for name, tensor in model.input.items()} == {
        "bands_10m": (32, 32, 4),
        "bands_20m": (16, 16, 2),
    }
    assert model.network.get_layer("stem_conv").kernel.shape[2] == 2
    random = np.random.default_rng(0)
    images = {group.name: random.integers(0, 90, (2, *group.shape)).astype(group.dtype) for group in GROUPS}
    joined = keras.Model(model.network.inputs, model.network.get_layer("stem_conv").input)(inputs_of(model, images))
    # B04 has mean 20, B05 mean 0; every standard deviation is 5.
    np.testing.assert_allclose(joined[..., 1], (images["bands_10m"][..., 2] - 20.0) / 5.0, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(joined[:, ::2, ::2, 0], images["bands_20m"][..., 0] / 5.0, rtol=1e-5)
    # Other bands and groups may hold anything; a whole record of the dataset is taken as it is.
    predict, served = make_predict(model, jit_compile=False), with_probabilities(model, "multi_label")
    expected = predict(images).numpy()
    images["bands_10m"][..., [0, 1, 3]] = 65_535
    images["bands_20m"][..., 1], images["sentinel1"][...] = 65_535, np.nan
    np.testing.assert_array_equal(predict(images), expected)
    assert set(served.input) == {"bands_10m", "bands_20m"}
    np.testing.assert_allclose(make_predict(served, jit_compile=False)(images), 1 / (1 + np.exp(-expected)), rtol=1e-5)
