"""Random crops and cutouts: which pixels go where, and that all image groups show the same place."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import AugmentedModel, augmentation_seeds
from models.layers.pad_crop import PadCrop
from models.layers.preprocessing import InputGroup, preprocess

GROUPS = [
    InputGroup("bands_10m", (24, 24, 2), "uint16", (500.0,) * 2, (300.0,) * 2),
    InputGroup("bands_20m", (12, 12, 3), "uint16", (900.0,) * 3, (400.0,) * 3),
    InputGroup("bands_60m", (4, 4, 1), "uint8", (70.0,), (20.0,)),
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


def test_shifts_by_hand():
    image = np.array([[1, 2], [3, 4]], np.uint8).reshape(1, 2, 2, 1)
    # Padded by 1: 1 1 2 2 / 1 1 2 2 / 3 3 4 4 / 3 3 4 4; the window starts at (down, across) of 0, 1 or 2.
    for down, across, expected in ((1, 1, [[1, 2], [3, 4]]), (0, 0, [[1, 1], [1, 1]]), (2, 1, [[3, 4], [3, 4]])):
        found = crop({"g": image}, [seed_of(down, across, count=3)])["g"][0, :, :, 0]
        np.testing.assert_array_equal(found, expected)
    zero = crop({"g": image}, [seed_of(2, 0, count=3, mirrored=True)], fill="zero")["g"][0, :, :, 0]
    np.testing.assert_array_equal(zero, [[3, 0], [0, 0]])


@pytest.mark.parametrize("jit_compile", [None, False, True])
@pytest.mark.parametrize("fill", ["reflect", "zero"])
@pytest.mark.parametrize("mirror", [True, False])
def test_every_shift_is_numpys_pad_and_crop(fill, mirror, jit_compile):
    random = np.random.default_rng(0)
    images: dict[str, np.ndarray] = {"g": random.integers(0, 256, (50, 5, 6, 3), np.uint8)}
    images["f"] = random.normal(size=(50, 5, 6, 1))
    shifts = [(down, across, mirrored) for down in range(5) for across in range(5) for mirrored in (False, True)]
    seeds = np.array([seed_of(d, a, count=5, mirrored=m) for d, a, m in shifts], np.int32)
    if jit_compile is None:
        found = crop(images, seeds, 2, fill, mirror)
    else:
        layer = PadCrop(2, fill, mirror, cutout=0)
        compiled = tf.function(lambda images, seeds: layer(images, seeds, training=True), jit_compile=jit_compile)
        found = compiled(images, tf.constant(seeds))
    for name, group in images.items():
        assert found[name].dtype == group.dtype
        for i, (down, across, mirrored) in enumerate(shifts):
            expected = by_numpy(group[i], 2, down, across, mirrored and mirror, fill)
            np.testing.assert_array_equal(found[name][i], expected)


@pytest.mark.parametrize("fill", ["reflect", "zero"])
def test_all_groups_of_a_sample_show_the_same_place(fill):
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in GROUPS}
    joined = keras.Model(inputs, preprocess(inputs, GROUPS, upsampling="nearest"))
    generator = np.random.default_rng(0)
    images = {
        group.name: generator.integers(1, np.iinfo(group.dtype).max, (64, *group.shape)).astype(group.dtype)
        for group in GROUPS
    }
    seeds = augmentation_seeds(0, 0, np.arange(64))
    moved = joined(crop(images, seeds, 12, fill)).numpy()
    # Of the joined image, the same window: what was 0 when it was stored is (0 - mean) / std now.
    before = joined(images).numpy()
    mean, std = (np.concatenate([np.array(getattr(group, each)) for group in GROUPS]) for each in ("mean", "std"))
    for i, seed in enumerate(seeds.view(np.uint32)):
        down, across = ((int(seed) >> bit) % 2**14 * 5 >> 14 for bit in (3, 17))
        expected = by_numpy(before[i] * std + mean, 12, 6 * down, 6 * across, bool(seed & 1), fill)
        np.testing.assert_allclose(moved[i], (expected - mean) / std, rtol=1e-4, atol=1e-4)


def test_shifts_are_uniform_and_independent_of_each_other_and_of_the_mirror():
    rows = np.arange(60_000)
    seeds = augmentation_seeds(0, 0, rows)
    places = np.arange(25, dtype=np.int32).reshape(1, 5, 5, 1)
    # The middle pixel says which window was taken; the mirror does not move it.
    middle = crop({"g": np.broadcast_to(places, (60_000, 5, 5, 1))}, seeds, 2)["g"][:, 2, 2, 0]
    pairs = 2 * middle + (seeds & 1)
    expected = len(rows) / 50
    chi_square = ((np.bincount(pairs, minlength=50) - expected) ** 2 / expected).sum()
    assert chi_square < 49 + 4 * np.sqrt(2 * 49)  # four standard deviations above its mean


def cut(images, seeds, cutout):
    """What `crop` returns for the same seeds without and with a square, and where they differ."""
    whole = crop(images, seeds, 6)
    found = crop(images, seeds, 6, cutout=cutout)
    return whole, found, {name: whole[name] != found[name] for name in images}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_the_square_is_filled_with_the_mean_of_the_crop(dtype):
    image = np.zeros((200, 12, 18, 2), dtype)
    image[..., 0], image[..., 1] = 10, 200
    image[:, ::2, ::2, :] += 3
    whole, found, changed = cut({"g": image}, augmentation_seeds(0, 0, np.arange(200)), 5)
    mean = whole["g"].mean((1, 2), keepdims=True, dtype=np.float64)
    expected = mean if dtype == "float32" else np.round(mean)
    for i in range(200):
        rows, columns = np.nonzero(changed["g"][i].any(-1))
        top, left = rows.min(), columns.min()
        assert (rows.max() - top, columns.max() - left) == (4, 4)  # no pixel has the mean's value, so all 25 changed
        by_hand = whole["g"][i].copy()
        by_hand[top : top + 5, left : left + 5] = expected[i]
        np.testing.assert_allclose(found["g"][i], by_hand, rtol=1e-6)
    assert found["g"].dtype == np.dtype(dtype)


def test_the_square_is_at_the_same_place_in_all_groups():
    generator = np.random.default_rng(0)
    # Values far from their mean, so that every pixel of the square changes.
    images = {
        group.name: (np.iinfo(group.dtype).max * generator.integers(0, 2, (64, *group.shape))).astype(group.dtype)
        for group in GROUPS
    }
    changed = cut(images, augmentation_seeds(0, 0, np.arange(64)), 12)[2]
    finest = changed["bands_10m"].any(-1)
    assert (finest.sum((1, 2)) == 12 * 12).all()
    for name, factor in (("bands_20m", 2), ("bands_60m", 6)):
        coarse = changed[name].any(-1)
        np.testing.assert_array_equal(coarse.repeat(factor, 1).repeat(factor, 2), finest)


def test_places_of_the_square_are_uniform_and_independent_of_the_crop():
    rows = np.arange(60_000)
    seeds = augmentation_seeds(0, 0, rows)
    # The middle pixel says which of 3 x 3 windows was taken; the first filled one, which of 3 x 3 squares.
    places = np.arange(1, 26, dtype=np.float32).reshape(1, 5, 5, 1) ** 2
    images = {"g": np.broadcast_to(places, (60_000, 5, 5, 1))}
    windows = np.unique(crop(images, seeds, 1)["g"][:, 2, 2, 0], return_inverse=True)[1]
    changed = (crop(images, seeds, 1)["g"] != crop(images, seeds, 1, cutout=3)["g"]).reshape(60_000, 25)
    squares = np.unique(changed.argmax(1), return_inverse=True)[1]
    expected = len(rows) / 81
    chi_square = ((np.bincount(9 * windows + squares, minlength=81) - expected) ** 2 / expected).sum()
    assert len(np.unique(squares)) == 9
    assert chi_square < 80 + 4 * np.sqrt(2 * 80)  # four standard deviations above its mean


def test_ranks_that_share_a_batch_see_the_images_that_one_rank_sees():
    rows = np.random.default_rng(3).permutation(10_000)[:12]
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
    whole = crop({"g": images}, augmentation_seeds(5, 2, rows), 4, cutout=3)["g"]
    for ranks in (2, 3):
        parts = np.split(np.arange(12), ranks)
        found = [crop({"g": images[part]}, augmentation_seeds(5, 2, rows[part]), 4, cutout=3)["g"] for part in parts]
        np.testing.assert_array_equal(np.concatenate(found), whole)


def test_groups_that_cannot_be_shifted_alike_missing_seeds_and_other_fills_are_refused():
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in GROUPS}
    network = keras.Model(inputs, keras.layers.Flatten()(preprocess(inputs, GROUPS, upsampling="nearest")))
    with pytest.raises(ValueError, match="a multiple of 6 fits all groups"):
        AugmentedModel(network, PadCrop(4, "reflect", mirror=True, cutout=0))
    with pytest.raises(ValueError, match="a cutout of 4 cuts it: a multiple of 6 fits all groups"):
        AugmentedModel(network, PadCrop(6, "reflect", mirror=True, cutout=4))
    model = AugmentedModel(network, PadCrop(6, "reflect", mirror=True, cutout=0))
    images = {group.name: np.zeros((1, *group.shape), group.dtype) for group in GROUPS}
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        model(images, training=True)
    np.testing.assert_array_equal(model(images), network(images))
    with pytest.raises(ValueError, match=r"fill must be one of \('reflect', 'zero'\), got 'mean'"):
        PadCrop(4, "mean", mirror=True, cutout=0)
    with pytest.raises(ValueError, match="padding must be at least 1, got 0"):
        PadCrop(0, "zero", mirror=True, cutout=0)
    with pytest.raises(ValueError, match="cutout must be at least 0, got -1"):
        PadCrop(1, "zero", mirror=True, cutout=-1)


def test_a_training_model_saves_and_loads_with_its_crops(tmp_path):
    inputs = {"g": keras.Input((8, 8, 1), dtype="uint8", name="g")}
    network = keras.Model(inputs, keras.layers.Flatten()(keras.ops.cast(inputs["g"], "float32")))
    model = AugmentedModel(network, PadCrop(2, "zero", mirror=False, cutout=3))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    images = {"g": np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), np.uint8)}
    seeds = augmentation_seeds(0, 0, np.arange(4))
    np.testing.assert_array_equal(loaded(images, training=True, seeds=seeds), model(images, training=True, seeds=seeds))
