"""Networks with the configuration's defaults, and images for them."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from conf.sections.networks import AirbenchConfig, ResNet9Config, ResNetCifarConfig, ResNetConfig
from models.layers.preprocessing import InputGroup
from models.networks.model import build_model
from models.networks.table import NETWORKS

CONFIGS: dict[str, Any] = {
    each().name: each for each in (ResNetConfig, ResNetCifarConfig, ResNet9Config, AirbenchConfig)
}
SMALL = {"resnet": {"depth": 18}, "resnet_cifar": {"depth": 8}}
"""Settings of the smallest networks that have every part."""


def group_of(name: str, shape: tuple[int, int, int], dtype: str = "uint16", mean: Any = 0.0, std: Any = 1.0) -> Any:
    """An image group; one number is the mean, or the deviation, of all bands."""
    return InputGroup(
        name, shape, dtype, *(tuple(np.broadcast_to(np.float64(value), shape[2]).tolist()) for value in (mean, std))
    )


def random_images(groups: Sequence[InputGroup], samples: int = 2, largest: int | None = None) -> dict[str, np.ndarray]:
    """Images of every group, up to the largest number of its type."""
    random, shapes = np.random.default_rng(0), {group.name: (samples, *group.shape) for group in groups}
    ends = {group.name: largest or np.iinfo(group.dtype).max for group in groups}
    return {each.name: random.integers(0, ends[each.name], shapes[each.name]).astype(each.dtype) for each in groups}


def settings_of(network: str, **settings: Any) -> dict[str, Any]:
    """What a network's function takes, by default a quarter as wide as published."""
    least: dict[str, Any] = SMALL.get(network, {})
    return {**CONFIGS[network]().arguments(), "width_factor": 0.25, **least, **settings}


def network_of(
    name: str, *, side: int = 32, bands: int = 3, classes: int = 10, seed: int = 0, **settings: Any
) -> keras.Model:
    """A network of normalised images `rgb`."""
    keras.utils.set_random_seed(seed)
    images = keras.Input((side, side, bands), name="rgb")
    return keras.Model(
        {"rgb": images}, NETWORKS[name](images, classes=classes, **{"dtype": None, **settings_of(name, **settings)})
    )


def normal_images(samples: int = 2, side: int = 32) -> dict[str, np.ndarray]:
    """Images for such a network."""
    return {"rgb": np.random.default_rng(0).normal(size=(samples, side, side, 3)).astype(np.float32)}


def model_of(network: str, groups: Sequence[InputGroup], *, classes: int = 3, **settings: Any) -> keras.Model:
    """A model of stored pixels, drawn from seed 0, in which every residual branch counts."""
    keras.utils.set_random_seed(0)
    rest = {"upsampling": "nearest", "augmentation": None, **settings_of(network, **settings)}
    model, random = build_model(list(groups), network=network, classes=classes, **rest), np.random.default_rng(1)
    for variable in model.trainable_variables:
        if variable.path.endswith("gamma"):  # gains of zero would hide the branches from comparisons of outputs
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    return model


def layers_of(model: keras.Model, kind: type) -> list[Any]:
    """Its layers of one type."""
    return [layer for layer in model.layers if isinstance(layer, kind)]


def assert_uniform(values: np.ndarray, count: int) -> None:
    """Whether values in 0 .. count - 1 are all as frequent, by chi-squared."""
    expected = len(values) / count
    chi_square = ((np.bincount(values, minlength=count) - expected) ** 2 / expected).sum()
    # Mean count - 1, variance 2 (count - 1), where the values are uniform; four standard deviations above.
    assert chi_square < count - 1 + 4 * np.sqrt(2 * (count - 1))


def without_gradient(model: keras.Model, samples: int = 2) -> set[str]:
    """Paths of trained variables that do not change the probability of class 0."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.nn.log_softmax(model(normal_images(samples), training=True))[:, 0])
    gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
    paths = [variable.path for variable in model.trainable_variables]
    return {path for path, gradient in zip(paths, gradients, strict=True) if not np.any(gradient)}
