"""Random crops and cutouts: which pixels go where, and that all image groups show the same place."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import AugmentedModel, augmentation_seeds
from models.layers.pad_crop import PadCrop
from models.layers.preprocessing import preprocess
from tests.models.built import assert_uniform, group_of, random_images

GROUPS = [
    group_of("bands_10m", (24, 24, 2), "uint16", 500, 300),
    group_of("bands_20m", (12, 12, 3), "uint16", 900, 400),
    group_of("bands_60m", (4, 4, 1), "uint8", 70, 20),
]


def seed_of(down: int, across: int, *, count: int, mirrored: bool = False) -> int:
    """The smallest seed of these shifts, counted from 0; floor(count * bits / 2**14) is the shift."""
    bits = [-(-shift * 2**14 // count) for shift in (down, across)]
    return bits[0] << 3 | bits[1] << 17 | mirrored


def crop(images, seeds, padding=1, fill="reflect", mirror=True, cutout=0):
    layer = PadCrop(padding, fill, mirror, cutout)
    return {name: group.numpy() for name, group in layer(images, np.asarray(seeds, np.int32), training=True).items()}


def by_numpy(image, padding, down, across, mirrored, mode):
    margins = ((padding, padding), (padding, padding), (0, 0))
    padded = np.pad(image, margins, "symmetric" if mode == "reflect" else "constant")
    cropped = padded[down : down + image.shape[0], across : across + image.shape[1]]
    return cropped[:, ::-1] if mirrored else cropped


@pytest.mark.parametrize(
    ("fill", "mirror", "jit_compile"),
    [("reflect", True, None), ("reflect", False, False), ("zero", True, False), ("zero", True, True)],
)
def test_every_shift_is_numpys_pad_and_crop(fill, mirror, jit_compile):
    random = np.random.default_rng(0)
    images: dict[str, np.ndarray] = {
        "g": random.integers(0, 256, (50, 5, 6, 3), np.uint8),
        "f": random.normal(size=(50, 5, 6, 1)),
    }
    shifts = [(down, across, mirrored) for down in range(5) for across in range(5) for mirrored in (False, True)]
    seeds = np.array([seed_of(d, a, count=5, mirrored=m) for d, a, m in shifts], np.int32)
    layer = PadCrop(2, fill, mirror, cutout=0)
    call = layer if jit_compile is None else tf.function(layer, jit_compile=jit_compile)
    found = call(images, tf.constant(seeds), training=True)
    for name, group in images.items():
        assert found[name].dtype == group.dtype
        for i, (down, across, mirrored) in enumerate(shifts):
            np.testing.assert_array_equal(
                found[name][i], by_numpy(group[i], 2, down, across, mirrored and mirror, fill)
            )


@pytest.mark.parametrize("fill", ["reflect", "zero"])
def test_all_groups_of_a_sample_show_the_same_place(fill):
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in GROUPS}
    joined = keras.Model(inputs, preprocess(inputs, GROUPS, upsampling="nearest"))
    images, seeds = random_images(GROUPS, 64), augmentation_seeds(0, 0, np.arange(64))
    moved = joined(crop(images, seeds, 12, fill)).numpy()
    # Of the joined image, the same window: what was 0 when it was stored is (0 - mean) / std now.
    before = joined(images).numpy()
    mean, std = (np.concatenate([np.array(getattr(group, each)) for group in GROUPS]) for each in ("mean", "std"))
    for i, seed in enumerate(seeds.view(np.uint32)):
        down, across = ((int(seed) >> bit) % 2**14 * 5 >> 14 for bit in (3, 17))
        expected = by_numpy(before[i] * std + mean, 12, 6 * down, 6 * across, bool(seed & 1), fill)
        np.testing.assert_allclose(moved[i], (expected - mean) / std, rtol=1e-4, atol=1e-4)


def test_shifts_are_uniform_and_independent_of_each_other_and_of_the_mirror():
    seeds, places = augmentation_seeds(0, 0, np.arange(60_000)), np.arange(25, dtype=np.int32).reshape(1, 5, 5, 1)
    # The middle pixel says which window was taken; the mirror does not move it.
    middle = crop({"g": np.broadcast_to(places, (60_000, 5, 5, 1))}, seeds, 2)["g"][:, 2, 2, 0]
    assert_uniform(2 * middle + (seeds & 1), 50)


def cut(images, seeds, cutout, padding=6):
    """What `crop` returns for the same seeds without and with a square, and where they differ."""
    whole, found = (crop(images, seeds, padding, cutout=side) for side in (0, cutout))
    return whole, found, {name: whole[name] != found[name] for name in images}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_the_square_is_filled_with_the_mean_of_the_crop(dtype):
    image = np.tile(np.array([10, 200], dtype), (200, 12, 18, 1))
    image[:, ::2, ::2, :] += 3
    whole, found, changed = cut({"g": image}, augmentation_seeds(0, 0, np.arange(200)), 5)
    mean = whole["g"].mean((1, 2), keepdims=True, dtype=np.float64)
    by_hand = np.where(changed["g"], mean if dtype == "float32" else np.round(mean), whole["g"])
    np.testing.assert_allclose(found["g"], by_hand, rtol=1e-6)
    assert found["g"].dtype == np.dtype(dtype)
    for square in changed["g"].all(-1):  # no pixel has the mean's value, so all 25 change
        rows, columns = np.nonzero(square)
        assert [len(rows), int(np.ptp(rows)), int(np.ptp(columns))] == [25, 4, 4]


def test_the_square_is_at_the_same_place_in_all_groups():
    # Values far from their mean, so that every pixel of the square changes.
    images = {name: 255 * group for name, group in random_images(GROUPS, 64, 2).items()}
    changed = cut(images, augmentation_seeds(0, 0, np.arange(64)), 12)[2]
    finest = changed["bands_10m"].any(-1)
    assert (finest.sum((1, 2)) == 12 * 12).all()
    for name, factor in (("bands_20m", 2), ("bands_60m", 6)):
        np.testing.assert_array_equal(changed[name].any(-1).repeat(factor, 1).repeat(factor, 2), finest)


def test_places_of_the_square_are_uniform_and_independent_of_the_crop():
    seeds = augmentation_seeds(0, 0, np.arange(60_000))
    # The middle pixel says which of 3 x 3 windows was taken; the first filled one, which of 3 x 3 squares.
    places = np.arange(1, 26, dtype=np.float32).reshape(1, 5, 5, 1) ** 2
    whole, _, changed = cut({"g": np.broadcast_to(places, (60_000, 5, 5, 1))}, seeds, 3, padding=1)
    windows = np.unique(whole["g"][:, 2, 2, 0], return_inverse=True)[1]
    squares = np.unique(changed["g"].reshape(60_000, 25).argmax(1), return_inverse=True)[1]
    assert_uniform(9 * windows + squares, 81)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((4, "reflect", True, 0), "a multiple of 6 fits all groups"),
        ((6, "reflect", True, 4), "a cutout of 4 cuts it: a multiple of 6 fits all groups"),
        ((4, "mean", True, 0), r"fill must be one of \('reflect', 'zero'\), got 'mean'"),
        ((0, "zero", True, 0), "padding must be at least 1, got 0"),
        ((1, "zero", True, -1), "cutout must be at least 0, got -1"),
    ],
)
def test_groups_that_cannot_be_shifted_alike_and_other_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PadCrop(*settings).build({group.name: (None, *group.shape) for group in GROUPS})


def test_a_training_model_saves_and_loads_with_its_crops_and_needs_seeds(tmp_path):
    inputs = {"g": keras.Input((8, 8, 1), dtype="uint8", name="g")}
    network = keras.Model(inputs, keras.layers.Flatten()(keras.ops.cast(inputs["g"], "float32")))
    model = AugmentedModel(network, PadCrop(2, "zero", mirror=False, cutout=3))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    images = {"g": np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)}
    augmented, again = (
        each(images, training=True, seeds=augmentation_seeds(0, 0, np.arange(4))) for each in (model, loaded)
    )
    np.testing.assert_array_equal(augmented, again)
    np.testing.assert_array_equal(model(images), network(images))
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        model(images, training=True)
