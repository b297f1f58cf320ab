"""Filters that whiten patches, and the layer that has them."""

import keras
import numpy as np
import pytest

from models.layers.augmentation import Augmentation
from models.networks.whitening import LAYER, patches_of, whiten, whitening_filters
from tests.models.built import group_of, model_of

GROUPS = [group_of("rgb", (16, 16, 3), "uint8", 128, 60), group_of("far", (8, 8, 2), mean=900, std=300)]


def model(augmentation=None, groups=GROUPS):
    return model_of("airbench", groups, augmentation=augmentation, width_factor=0.125)


def kernel_after(images, groups=GROUPS):
    built = model(groups=groups)
    whiten(built, images)
    return np.array(built.get_layer(LAYER).kernel)


def smooth_images(samples=40):
    """Neighbouring pixels and bands are alike, as in photographs."""
    random = np.random.default_rng(0)
    rough = random.normal(size=(samples, 18, 18, 1)) + 0.3 * random.normal(size=(samples, 18, 18, 3))
    smooth = sum(rough[:, row : row + 16, column : column + 16] for row in range(3) for column in range(3))
    far = np.clip(900 + 300 * random.normal(size=(samples, 8, 8, 2)), 0, 60000).astype(np.uint16)
    return {"rgb": np.clip(128 + 20 * smooth, 0, 255).astype(np.uint8), "far": far}


def correlations(responses):
    flat = np.asarray(responses, np.float64).reshape(-1, responses.shape[-1])
    return flat.T @ flat / len(flat)


def test_responses_to_correlated_patches_are_uncorrelated_and_of_variance_1():
    random = np.random.default_rng(0)
    # Two directions of much variance beside ten of little.
    mixing = random.normal(size=(12, 12)) / 4 + 3 * np.eye(12, 2) @ np.ones((2, 12))
    patches = random.normal(size=(50_000, 12)) @ mixing
    filters = whitening_filters(patches.T @ patches / len(patches))
    assert filters.shape == (12, 24)
    np.testing.assert_array_equal(filters[:, 12:], -filters[:, :12])
    responses = correlations(patches @ filters[:, :12])
    np.testing.assert_allclose(responses, np.diag(np.diag(responses)), atol=1e-3)
    variances = np.linalg.eigvalsh(patches.T @ patches / len(patches))[::-1]
    np.testing.assert_allclose(np.diag(responses), variances / (variances + 5e-4), rtol=1e-4)
    assert np.abs(correlations(patches) - np.diag(variances)).max() > 5


def test_directions_without_variance_are_not_magnified_without_end():
    filters = whitening_filters(np.diag([4.0, 1.0, 0.0]))
    assert np.abs(filters).max() == pytest.approx(1 / np.sqrt(5e-4))
    np.testing.assert_allclose(np.abs(filters[:, :3]).max(axis=0), [0.5, 1.0, 1 / np.sqrt(5e-4)], rtol=1e-3)


def test_patches_are_flat_as_in_a_kernel():
    images = np.random.default_rng(0).normal(size=(2, 5, 4, 3))
    patches = patches_of(images, 2)
    assert patches.shape == (2 * 4 * 3, 12)
    np.testing.assert_array_equal(patches[0], images[0, :2, :2].reshape(-1))
    np.testing.assert_array_equal(patches[-1], images[1, 3:5, 2:4].reshape(-1))


@pytest.mark.parametrize("augmentation", [None, Augmentation("flips")])
def test_a_model_whitens_the_bands_of_all_groups(augmentation):
    built, images = model(augmentation), smooth_images()
    whiten(built, [images])
    network = built if augmentation is None else built.network
    assert not any(LAYER in variable.path for variable in built.trainable_variables)
    assert network.get_layer(LAYER).kernel.shape == (2, 2, 5, 40)
    responses = correlations(keras.Model(network.input, network.get_layer(LAYER).output)(images))[:20, :20]
    np.testing.assert_allclose(responses, np.diag(np.diag(responses)), atol=2e-2)
    assert 0.8 < np.diag(responses).min() < np.diag(responses).max() < 1.05


def test_the_number_of_batches_does_not_count():
    images = smooth_images()
    parts = [{name: group[first : first + 7] for name, group in images.items()} for first in range(0, 40, 7)]
    np.testing.assert_allclose(kernel_after([images]), kernel_after(parts), rtol=1e-4, atol=1e-4)


def test_large_images_are_whitened_by_a_part_of_them():
    groups = [group_of("rgb", (600, 600, 3), "float32")]
    images = np.random.default_rng(0).normal(size=(1, 600, 600, 3)).astype(np.float32)
    before = kernel_after([{"rgb": images}], groups)
    images[:, 512:] += 50
    np.testing.assert_array_equal(kernel_after([{"rgb": images}], groups), before)


def test_images_that_cannot_whiten_are_refused():
    with pytest.raises(ValueError, match="needs training images: got none"):
        whiten(model(), [])
    groups = [group_of("rgb", (16, 16, 3), "float32")]
    with pytest.raises(ValueError, match="pixels that are not finite"):
        kernel_after([{"rgb": np.full((2, 16, 16, 3), np.nan, np.float32)}], groups)
