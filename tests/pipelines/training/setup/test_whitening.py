"""The whitening convolution begins with filters of the training split."""

from pathlib import Path

import keras
import numpy as np
import pytest

from conf.load import load
from conf.schema import RunConfig
from models.networks.whitening import LAYER, patches_of, whitening_filters
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.training.setup.rank_setup import begin_whitened
from pipelines.training.setup.recipe import make_model

pytestmark = pytest.mark.spark


def config(dataset: Path, *settings: str) -> RunConfig:
    return load("smoke", [f"dataset.path={dataset}", "model={name: airbench, width_factor: 0.125}", *settings])


def begun(chosen: RunConfig) -> tuple[keras.Model, str]:
    """The network without the augmentation before it, and what is said of its beginning."""
    keras.utils.set_random_seed(0)
    manifest = read_manifest(chosen.dataset.path)
    model = make_model(chosen, manifest)
    line = begin_whitened(model, chosen.dataset.path, chosen.reader, manifest, chosen.input.bands)
    return getattr(model, "network", model), line


def kernel_of(network: keras.Model) -> np.ndarray:
    return np.array(network.get_layer(LAYER).kernel)


def test_it_whitens_by_samples_of_the_training_split(small_dataset: Path) -> None:
    network, line = begun(config(small_dataset))
    reader = SplitReader(small_dataset, "train")
    assert line == f"the first convolution whitens patches by {len(reader)} training images"
    seen = keras.Model(network.input, network.get_layer(LAYER).input)(reader.gather(np.arange(len(reader))).images)
    patches = patches_of(np.asarray(seen, np.float64), 2)
    expected = whitening_filters(patches.T @ patches / len(patches))
    half = expected.shape[1] // 2
    # Eigenvectors of like variance may turn within their plane: what the filters do is compared, not what they are.
    products = [
        filters[:, :half] @ filters[:, :half].T for filters in (kernel_of(network).reshape(expected.shape), expected)
    ]
    np.testing.assert_allclose(products[0], products[1], rtol=1e-2)
    # It is the same again.
    np.testing.assert_array_equal(kernel_of(begun(config(small_dataset))[0]), kernel_of(network))


def test_it_whitens_the_bands_that_the_network_sees(small_dataset: Path) -> None:
    network, _ = begun(config(small_dataset, "input.bands=[B04, B8A]"))
    assert kernel_of(network).shape == (2, 2, 2, 16)
