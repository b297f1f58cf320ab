"""Flips and quarter turns: which pixels go where, who draws the same, what models keep; mixing of samples in pairs."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from models.layers.augmentation import (
    Augmentation,
    AugmentedModel,
    augmentation_seeds,
    mix_pairs,
    mixing_coefficients,
)
from models.layers.normalisation import FusedBatchNormalization
from models.layers.pad_crop import PadCrop
from models.layers.preprocessing import preprocess
from models.layers.table import AUGMENTATIONS
from models.losses import classification_loss
from models.networks.model import with_probabilities
from tests.models.built import assert_uniform, group_of, model_of, random_images

# Clockwise: 5; counter-clockwise: 6; the diagonals: 4 and 7.
BY_HAND = {
    0: [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
    1: [[3, 2, 1], [6, 5, 4], [9, 8, 7]],
    2: [[7, 8, 9], [4, 5, 6], [1, 2, 3]],
    3: [[9, 8, 7], [6, 5, 4], [3, 2, 1]],
    4: [[1, 4, 7], [2, 5, 8], [3, 6, 9]],
    5: [[7, 4, 1], [8, 5, 2], [9, 6, 3]],
    6: [[3, 6, 9], [2, 5, 8], [1, 4, 7]],
    7: [[9, 6, 3], [8, 5, 2], [7, 4, 1]],
}
GROUPS = [
    group_of("bands_10m", (24, 24, 4), "uint16", 500, 300),
    group_of("bands_20m", (12, 12, 6), "uint16", 900, 400),
    group_of("bands_60m", (4, 4, 3), "uint8", 70, 20),
]
EVERY_ELEMENT = np.arange(8, dtype=np.int32)


def augment(images, seeds, kind="dihedral"):
    augmented = Augmentation(kind)(images, np.asarray(seeds, np.int32), training=True)
    return {name: group.numpy() for name, group in augmented.items()}


def build_small(augmentation, dtype="uint16"):
    group = group_of("fine", (16, 16, 2), dtype, (30_000, 28_000), (19_000, 18_000))
    model = model_of("resnet", [group], augmentation=AUGMENTATIONS[augmentation](), width_factor=0.125)
    return model, random_images([group], 8, 65536)


@pytest.fixture(scope="module")
def small():
    return build_small("dihedral")


@pytest.mark.parametrize("element", EVERY_ELEMENT)
def test_each_element_moves_the_pixels_as_by_hand(element):
    image = np.array(BY_HAND[0], np.uint16)[np.newaxis, ..., np.newaxis]
    moved = augment({"g": np.concatenate([image, 10 * image], axis=-1)}, [element])["g"][0]
    np.testing.assert_array_equal(moved[..., 0], BY_HAND[element])
    np.testing.assert_array_equal(moved[..., 1], 10 * np.array(BY_HAND[element]))


def test_flips_never_turn_and_take_images_that_are_no_squares():
    image = np.array([[1, 2, 3], [4, 5, 6]], np.uint8)[..., np.newaxis]
    moved = augment({"g": np.stack([image] * 8)}, EVERY_ELEMENT, "flips")["g"][..., 0]
    by_hand = [[[1, 2, 3], [4, 5, 6]], [[3, 2, 1], [6, 5, 4]], [[4, 5, 6], [1, 2, 3]], [[6, 5, 4], [3, 2, 1]]]
    np.testing.assert_array_equal(moved, by_hand + by_hand)


def test_the_lowest_bits_choose_whatever_the_sign():
    image = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
    for element in EVERY_ELEMENT:
        expected = augment({"g": image}, [element])["g"]
        np.testing.assert_array_equal(augment({"g": image}, [element - 8])["g"], expected)
        np.testing.assert_array_equal(augment({"g": image}, [int(element) - 2**31])["g"], expected)


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "bicubic"])
def test_all_groups_of_a_sample_move_alike(upsampling):
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in GROUPS}
    joined = keras.Model(inputs, preprocess(inputs, GROUPS, upsampling=upsampling))
    images = random_images(GROUPS, 8)
    # Turning the groups and then joining them is joining them and then turning all bands.
    expected = augment({"joined": joined(images).numpy()}, EVERY_ELEMENT)["joined"]
    np.testing.assert_allclose(joined(augment(images, EVERY_ELEMENT)), expected, atol=2e-4)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("kind", ["flips", "dihedral"])
def test_gives_the_same_pixels_when_compiled(kind, jit_compile):
    floats = np.random.default_rng(2).normal(size=(8, 6, 6, 3)).astype(np.float32)
    images = {**random_images(GROUPS, 8), "floats": floats}
    compiled = tf.function(Augmentation(kind), jit_compile=jit_compile)
    augmented = compiled(images, tf.constant(EVERY_ELEMENT), training=True)
    for name, expected in augment(images, EVERY_ELEMENT, kind).items():
        assert augmented[name].dtype == images[name].dtype
        np.testing.assert_array_equal(augmented[name], expected)


@pytest.mark.parametrize("kind", ["dihedral", "pad_crop"])
def test_ranks_that_share_a_batch_see_the_images_that_one_rank_sees(kind):
    layer = Augmentation(kind) if kind == "dihedral" else PadCrop(12, "reflect", mirror=True, cutout=6)
    images, rows = random_images(GROUPS, 12), np.random.default_rng(3).permutation(10_000)[:12]
    seeds = augmentation_seeds(5, 2, rows)
    whole = layer(images, seeds, training=True)
    assert len({int(seed) % 8 for seed in seeds}) > 3
    for ranks in (2, 3, 4):
        parts = [
            layer({name: images[name][part] for name in images}, augmentation_seeds(5, 2, rows[part]), training=True)
            for part in np.split(np.arange(12), ranks)
        ]
        for name, expected in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), expected)


def test_seeds_follow_the_row_and_keep_its_shape():
    rows = np.arange(60).reshape(3, 20)
    seeds = augmentation_seeds(1, 2, rows)
    assert [seeds.dtype.name, *seeds.shape, len(np.unique(seeds))] == ["int32", 3, 20, 60]
    np.testing.assert_array_equal(augmentation_seeds(1, 2, rows.astype(np.int32)[:, ::-1])[:, ::-1], seeds)
    assert (augmentation_seeds(1, 2, 7), augmentation_seeds(2**64 - 1, 2**64 - 1, np.arange(0)).shape) == (
        seeds[0, 7],
        (0,),
    )


def test_seeds_are_words_of_splitmix64():
    # The first words of SplitMix64 from state 1234567: word i = mix(state + i * increment), its top half the seed.
    state, increment = 1234567, 0x9E3779B97F4A7C15
    words, key = [6457827717110365317, 3203168211198807973, 9817491932198370423], mixed(mixed(0))
    seeds = augmentation_seeds(0, 0, np.array([(state + i * increment - key) % 2**64 for i in range(3)], np.uint64))
    assert seeds.view(np.uint32).tolist() == [word >> 32 for word in words]


def mixed(word):
    """The output function in Python's own integers."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


@pytest.mark.parametrize("count", [4, 8])
def test_elements_are_uniform_over_rows_epochs_and_seeds_and_independent_between_them(count):
    rows = np.arange(64_000)
    first = augmentation_seeds(0, 0, rows) % count
    assert_uniform(first, count)
    assert_uniform(np.concatenate([augmentation_seeds(0, epoch, [17]) for epoch in range(16_000)]) % count, count)
    others = {  # whose pairs with the first must be uniform too
        "next row": augmentation_seeds(0, 0, rows + 1),
        "next epoch": augmentation_seeds(0, 1, rows),
        "next row of the next epoch": augmentation_seeds(0, 1, rows + 1),
        "next seed": augmentation_seeds(1, 0, rows),
    }
    for other in others.values():
        assert_uniform(first * count + other % count, count**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, [0]), r"seed must be in \[0, 2\*\*64\), got -1"),
        ((0, 2**64, [0]), "epoch must be in"),
        ((0, 0, [0.5]), "rows must be integers, got float64"),
    ],
)
def test_seeds_of_anything_else_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        augmentation_seeds(*arguments)


def test_what_cannot_be_augmented_is_refused(small):
    wide = {"wide": (None, 32, 48, 1)}
    with pytest.raises(ValueError, match="group 'wide' has 32 x 48 pixels: choose 'flips' or 'none'"):
        Augmentation("dihedral").build(wide)
    Augmentation("flips").build(wide)
    for kind in ("rotate", "none"):
        with pytest.raises(ValueError, match=rf"'flips', 'dihedral'\), got '{kind}'"):
            Augmentation(kind)
    model, images = small
    with pytest.raises(ValueError, match="needs seeds, one per sample"):
        model(images, training=True)


def test_without_training_nothing_moves_seeds_or_not(small):
    model, images = small
    expected = model.network(images)
    np.testing.assert_array_equal(model(images), expected)
    np.testing.assert_array_equal(model(images, training=False, seeds=EVERY_ELEMENT), expected)
    np.testing.assert_array_equal(
        Augmentation("dihedral")(images, EVERY_ELEMENT, training=False)["fine"], images["fine"]
    )


@pytest.mark.parametrize("jit_compile", [False, True])
def test_training_is_the_networks_on_the_augmented_images(jit_compile):
    keras.utils.set_random_seed(0)
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in GROUPS}
    features = keras.layers.Conv2D(5, 3, strides=2)(preprocess(inputs, GROUPS, upsampling="nearest"))
    features = keras.ops.relu(FusedBatchNormalization()(features))
    model = AugmentedModel(
        keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(features))), Augmentation("dihedral")
    )
    images = random_images(GROUPS, 8)
    augmented = augment(images, EVERY_ELEMENT)

    @tf.function(jit_compile=jit_compile)
    def gradients(forward):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(forward() ** 2)
        return [value, *tape.gradient(value, [variable.value for variable in model.trainable_variables])]

    expected = gradients(lambda: model.network(augmented, training=True))
    found = gradients(lambda: model(images, training=True, seeds=tf.constant(EVERY_ELEMENT)))
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())
    assert abs(found[0] / gradients(lambda: model.network(images, training=True))[0] - 1) > 1e-3


def test_a_model_without_augmentation_takes_seeds_and_leaves_the_images():
    model, images = build_small("none")
    assert not isinstance(model, AugmentedModel)
    if "kwargs" not in inspect.signature(model.call).parameters:
        pytest.skip("functional models of this Keras take no further arguments, and no step passes them seeds")
    np.testing.assert_array_equal(model(images, training=True, seeds=EVERY_ELEMENT), model(images, training=True))


def test_variables_are_the_networks_in_order(small):
    (plain, _), (model, _) = build_small("none"), small
    for attribute in ("variables", "trainable_variables", "non_trainable_variables"):
        own, networks, others = (getattr(each, attribute) for each in (model, model.network, plain))
        assert (list(map(id, own)), [variable.path for variable in own]) == (
            list(map(id, networks)),
            [variable.path for variable in others],
        )


def test_the_layer_works_in_a_functional_model():
    inputs = {group.name: keras.Input(group.shape, dtype=group.dtype, name=group.name) for group in GROUPS}
    seeds = keras.Input((), dtype="int32", name="seeds")
    augmented, images = Augmentation("dihedral")(inputs, seeds), random_images(GROUPS, 8)
    assert {name: (each.shape[1:], each.dtype) for name, each in augmented.items()} == {
        group.name: (group.shape, group.dtype) for group in GROUPS
    }
    found = keras.Model([inputs, seeds], augmented)([images, EVERY_ELEMENT], training=True)
    for name, expected in augment(images, EVERY_ELEMENT).items():
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_half_precision_policies_keep_all_of_a_pixel(policy, dtype, dtype_policy, monkeypatch):
    dtype_policy(policy)
    model, images = build_small("dihedral", dtype)
    assert model.augmentation.compute_dtype == policy.removeprefix("mixed_")
    augmented = model.augmentation(images, EVERY_ELEMENT, training=True)["fine"]
    assert augmented.dtype == dtype
    np.testing.assert_array_equal(np.sort(augmented, axis=None), np.sort(images["fine"], axis=None))
    # 65,535 is out of float16's range, 65,535 and 65,534 are one number in bfloat16.
    extremes = {"fine": np.tile(np.array([65535, 65534], dtype), (8, 16, 16, 1))}
    seen, forward = [], model.network.call
    monkeypatch.setattr(model.network, "call", lambda images, **rest: seen.append(images) or forward(images, **rest))
    assert model(extremes, training=True, seeds=EVERY_ELEMENT).dtype == tf.float32
    np.testing.assert_array_equal(seen[0]["fine"], extremes["fine"])


def test_the_training_model_saves_and_loads_with_its_augmentation_and_is_served_without(small, tmp_path):
    model, images = small
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.augmentation.kind == "dihedral"
    np.testing.assert_array_equal(loaded(images), model(images))
    # `test_model` loads such a model where nothing but Keras is.
    served = with_probabilities(model, "multi_label")
    np.testing.assert_allclose(served(images), tf.sigmoid(model(images)), atol=1e-5)
    assert ["groundswell" in each.to_json() for each in (model, served)] == [True, False]


ROWS = np.arange(20_000)


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.4, 1.0])
def test_coefficients_have_the_beta_distribution(alpha):
    drawn = mixing_coefficients(alpha, seed=3, epoch=1, rows=ROWS)
    assert drawn.dtype == np.float32
    assert 0 <= drawn.min() <= drawn.max() <= 1
    expected = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    assert (drawn.mean(), drawn.var()) == (
        pytest.approx(0.5, abs=0.01),
        pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03),
    )
    # Compared as parts, because most values of a small alpha are 0 or 1 to many digits.
    for limit in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999):
        assert (drawn <= limit).mean() == pytest.approx((expected <= limit).mean(), abs=0.015)


def test_coefficients_are_a_function_of_seed_epoch_and_row_alone():
    drawn = mixing_coefficients(0.3, seed=3, epoch=1, rows=ROWS[:64])
    shuffled = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(mixing_coefficients(0.3, seed=3, epoch=1, rows=shuffled), drawn[shuffled])
    for other in ({"seed": 4, "epoch": 1}, {"seed": 3, "epoch": 2}):
        assert np.abs(mixing_coefficients(0.3, **other, rows=ROWS[:64]) - drawn).mean() > 0.1
    seeds = augmentation_seeds(3, 1, ROWS).astype(np.float64)
    assert abs(np.corrcoef(seeds, mixing_coefficients(1.0, seed=3, epoch=1, rows=ROWS))[0, 1]) < 0.03


@pytest.mark.parametrize("alpha", [0.0, 1.5, -0.1])
def test_an_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\], got"):
        mixing_coefficients(alpha, seed=0, epoch=0, rows=[0])


@pytest.mark.parametrize("dtype", ["float64", "float32", "uint16", "uint8"])
def test_pairs_are_mixed_as_the_formula_says_and_the_largest_pixel_stays(dtype):
    values = np.random.default_rng(0).integers(0, 255, (6, 2, 3)).astype(dtype)
    c = np.array([1.0, 0.0, 0.25, 0.5, 0.7, 0.1], np.float32)
    expected = (c * values.T + (1 - c) * values[[1, 0, 3, 2, 5, 4]].T).T
    mixed = mix_pairs(tf.constant(values), tf.constant(c))
    assert mixed.dtype == dtype
    np.testing.assert_allclose(mixed, expected, rtol=1e-6, atol=0 if dtype.startswith("float") else 0.501)
    largest = np.full((202, 4), 65_535 if dtype == "uint16" else 255, dtype)
    parts = np.linspace(0, 1, 101, dtype=np.float32).repeat(2)
    np.testing.assert_allclose(mix_pairs(tf.constant(largest), tf.constant(parts)), largest, rtol=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("task", ["multi_label", "single_label"])
def test_the_loss_of_mixed_targets_is_the_mixed_loss(task, label_smoothing):
    random, targets = np.random.default_rng(0), np.eye(4, dtype=np.float32)[[0, 2, 3, 3, 1, 0]]
    if task == "multi_label":
        targets = np.maximum(targets, np.eye(4, dtype=np.float32)[[1, 2, 0, 3, 1, 3]])
    coefficients, logits = random.random(6, np.float32), random.normal(0, 2, (6, 4)).astype(np.float32)
    loss = classification_loss(task, label_smoothing=label_smoothing)
    mixed = loss(mix_pairs(tf.constant(targets), tf.constant(coefficients)), tf.constant(logits))
    own, partners = (loss(tf.constant(each), tf.constant(logits)) for each in (targets, targets[[1, 0, 3, 2, 5, 4]]))
    np.testing.assert_allclose(mixed, coefficients * own + (1 - coefficients) * partners, rtol=1e-5)
