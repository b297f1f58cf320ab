"""Normalisation, resizing and order of the image groups."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from PIL.Image import Resampling

from models.layers.preprocessing import InputGroup, preprocess
from tests.models.built import group_of

# All of uint16's range, down to single pixels: a gradient, a disc with a hard edge, and noise.
_ROWS, _COLUMNS = np.mgrid[:120, :120]
_SCENE = 300.0 * _COLUMNS + 40_000 * ((_ROWS - 9) ** 2 + (_COLUMNS - 12) ** 2 < 64)
TEST_IMAGE = np.clip(
    _SCENE[..., np.newaxis] + np.random.default_rng(0).normal(0, 9_000, (2, 120, 120, 2)), 0, 65_535
).astype(np.uint16)


def preprocessing_model(groups, upsampling="nearest"):
    inputs = {each.name: keras.Input(each.shape, dtype=each.dtype, name=each.name) for each in groups}
    return keras.Model(inputs, preprocess(inputs, groups, upsampling=upsampling))


def run(groups, images, upsampling="nearest"):
    return preprocessing_model(groups, upsampling)(images).numpy()


def test_normalises_with_the_statistics_of_each_band_and_joins_in_the_order_of_the_groups():
    groups = [
        group_of("late", (2, 2, 1), "uint16", (1000.0,), (200.0,)),
        group_of("early", (2, 2, 2), "uint8", (10.0, 20.0), (2.0, 5.0)),
    ]
    images = {
        "early": np.array([[[[10, 20], [12, 25]], [[14, 30], [8, 15]]]], np.uint8),
        "late": np.array([[[[1000], [1200]], [[800], [65000]]]], np.uint16),
    }
    # (pixel - mean) / std: late first, although its name sorts last; (65000 - 1000) / 200 = 320.
    np.testing.assert_allclose(
        run(groups, images), np.array([[[[0, 0, 0], [1, 1, 1]], [[-1, 2, 2], [320, -1, -1]]]], np.float32), rtol=1e-6
    )


def test_constant_band_is_centred_only():
    np.testing.assert_array_equal(
        run([group_of("g", (2, 2, 1), "float32", 4, 0)], {"g": np.full((1, 2, 2, 1), 7.0, np.float32)}), 3.0
    )


def test_bands_in_small_units_are_normalised_and_saved(tmp_path):
    groups = [group_of("g", (2, 2, 2), "float32", (0, 1), (2e-9, 0.5))]
    images = {"g": np.broadcast_to(np.array([1e-9, 2.0], np.float32), (1, 2, 2, 2))}
    np.testing.assert_allclose(run(groups, images)[0, 0, 0], [0.5, 2.0], rtol=1e-6)
    preprocessing_model(groups, "nearest").save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "model.keras")(images), run(groups, images))


@pytest.mark.parametrize("size", [(11, 8), (6, 8)])  # a ratio that is no whole number; one direction only
@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "bicubic"])
def test_agrees_with_tf_image_resize(upsampling, size):
    coarse = np.random.default_rng(0).normal(size=(2, 6, 4, 3)).astype(np.float32)
    groups = [group_of("fine", (*size, 1), "float32"), group_of("coarse", (6, 4, 3), "float32")]
    joined = run(groups, {"fine": np.zeros((2, *size, 1), np.float32), "coarse": coarse}, upsampling)
    expected = tf.image.resize(coarse, size, method=upsampling)
    # TensorFlow reads its bicubic weights from a table of 1024 steps.
    np.testing.assert_allclose(joined[..., 1:], expected, atol=3e-3 if upsampling == "bicubic" else 1e-5)


@pytest.mark.parametrize("compiled", [None, False, True], ids=["eager", "function", "xla"])
@pytest.mark.parametrize("upsampling", ["nearest", "bilinear", "bicubic"])
def test_sentinel_groups_are_the_pixels_of_pillow_and_tensorflow(upsampling, compiled):
    groups = [group_of(f"bands_{side}", (side, side, 2), "uint16") for side in (120, 60, 20)]
    images = {each.name: TEST_IMAGE[:, : each.shape[0], : each.shape[1]] for each in groups}
    model = preprocessing_model(groups, upsampling)
    joined = (model if compiled is None else tf.function(model, jit_compile=compiled))(images).numpy()
    np.testing.assert_array_equal(joined[..., :2], images["bands_120"])
    for first_band, each in ((2, groups[1]), (4, groups[2])):
        found, coarse = joined[..., first_band : first_band + 2], images[each.name]
        # Of 65,535 counts; float32 steps by 0.004 to 0.008 there, and a bicubic pixel is a sum of 16.
        atol = 0 if upsampling == "nearest" else 0.03
        np.testing.assert_allclose(found, pillow_resized(coarse, upsampling), rtol=0, atol=atol)
        # TensorFlow's bilinear weights are float32 too, its bicubic ones from a table of 1024 steps.
        atol = {"nearest": 0, "bilinear": 0.2, "bicubic": 65_535 / 1024}[upsampling]
        np.testing.assert_allclose(
            found, tf.image.resize(coarse.astype(np.float32), (120, 120), method=upsampling), rtol=0, atol=atol
        )


def pillow_resized(images, upsampling):
    """Each band resized to 120 x 120 pixels by Pillow, in float32."""
    method = Resampling[upsampling.upper()]
    resized = [
        [np.asarray(Image.fromarray(band).resize((120, 120), method)) for band in np.moveaxis(image, -1, 0)]
        for image in images.astype(np.float32)
    ]
    return np.moveaxis(np.array(resized), 1, -1)


def test_stays_in_float32_under_a_half_precision_policy(dtype_policy):
    dtype_policy("mixed_float16")
    joined = run([group_of("g", (1, 1, 1))], {"g": np.full((1, 1, 1, 1), 65535, np.uint16)})
    assert (joined.dtype, joined.item()) == (np.float32, 65535)


@pytest.mark.parametrize(
    ("mean", "std", "channels", "message"),
    [
        ((1.0,), (1.0, 1.0), None, "mean of group 'g' has 1 values for 2 bands"),
        ((1.0, 1.0), (1.0,) * 3, None, "std of group 'g' has 3 values for 2 bands"),
        ((1.0, 1.0), (1.0, -1.0), None, "must not be negative"),
        ((float("nan"), 1.0), (1.0, 1.0), None, "must be finite"),
        ((0.0, 0.0), (1.0, 1.0), (0,), "channels of group 'g' has 1 values for 2 bands"),
        ((0.0, 0.0), (1.0, 1.0), (0, 2), r"channels must be 0 to their number, each once, got \[0, 2\]"),
    ],
)
def test_rejects_statistics_and_channels_that_do_not_fit(mean, std, channels, message):
    with pytest.raises(ValueError, match=message):
        preprocessing_model([InputGroup("g", (4, 4, 2), "uint16", mean, std, channels)])


def test_rejects_groups_and_upsamplings_that_it_does_not_know():
    inputs, one = {"g": keras.Input((4, 4, 1), name="g")}, group_of("g", (4, 4, 1))
    for groups in ([], [one, one], [group_of("other", (4, 4, 1))]):
        with pytest.raises(ValueError, match="distinct and among the inputs"):
            preprocess(inputs, groups, upsampling="nearest")
    with pytest.raises(ValueError, match="'cubic'"):
        preprocess(inputs, [one], upsampling="cubic")


def test_channels_choose_and_order_the_bands_of_all_groups():
    groups = [
        InputGroup("fine", (2, 2, 3), "uint16", (10.0, 20.0, 30.0), (1.0, 2.0, 3.0), (3, None, 0)),
        InputGroup("coarse", (1, 1, 2), "uint16", (5.0, 6.0), (1.0, 2.0), (2, 1)),
    ]
    fine = np.tile(np.array([11, 20, 36], np.uint16), (1, 2, 2, 1))
    images, model = {"fine": fine, "coarse": np.array([[[[7, 10]]]], np.uint16)}, preprocessing_model(groups)
    # Channel 0 is (36 - 30) / 3, channel 1 is (10 - 6) / 2, channel 2 is (7 - 5) / 1, channel 3 is (11 - 10) / 1.
    for call in (model, tf.function(model), tf.function(model, jit_compile=True)):
        np.testing.assert_allclose(call(images), np.broadcast_to([2.0, 2.0, 2.0, 1.0], (1, 2, 2, 4)), rtol=1e-6)
