"""Tries what TensorFlow alone can compute under another backend of Keras, and prints what each part says as JSON."""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from models.layers.meprop import MeProp
from models.layers.mixup import mix_pairs
from models.layers.normalisation import normalise_over
from models.layers.preprocessing import InputGroup
from models.layers.table import AUGMENTATIONS
from models.networks.model import build_model

GROUP = InputGroup("image", (8, 8, 3), "uint8", (100.0,) * 3, (50.0,) * 3)
IMAGES = {"image": np.zeros((2, 8, 8, 3), np.uint8)}
SEEDS = np.arange(2, dtype=np.int32)
PLAIN = {
    "depth": 8,
    "width_factor": 0.25,
    "preactivation": False,
    "stem_stride": 1,
    "dropout": 0.0,
    "stochastic_depth": 0.0,
    "zero_init_residual": True,
}


def identity(images: Any, seeds: Any) -> Any:
    """An augmentation of somebody's own."""
    return images


def build(augmentation: Any = None, **settings: Any) -> keras.Model:
    """Build the smallest network with some settings."""
    chosen = {**PLAIN, **settings}
    return build_model(
        [GROUP], network="resnet_cifar", classes=3, upsampling="nearest", augmentation=augmentation, **chosen
    )


def augment(name: str, **settings: Any) -> Any:
    """Let an augmentation of the table change images."""
    return AUGMENTATIONS[name](**settings)(IMAGES, SEEDS, training=True)  # type: ignore[misc]


PARTS: dict[str, Callable[[], Any]] = {
    "a model that augments": lambda: build(AUGMENTATIONS["flips"]()),
    "a model with dropout": lambda: build(dropout=0.1),
    "a model with stochastic depth": lambda: build(stochastic_depth=0.1),
    "dihedral": lambda: augment("dihedral"),
    "pad_crop": lambda: augment("pad_crop", padding=1, fill="zero", mirror=False, cutout=0),
    "import": lambda: augment("import", path=f"{__name__}:identity", settings={}),
    "batch norm over ranks": lambda: normalise_over(build(), None),  # type: ignore[arg-type]
    "mixup": lambda: mix_pairs(np.zeros((2, 3), np.float32), np.ones(2, np.float32)),
    "meprop": lambda: MeProp(keras.layers.Dense(4), 2)(np.zeros((2, 3), np.float32)),
}


def main() -> None:
    """Try all parts."""
    said = {}
    for name, part in PARTS.items():
        try:
            part()
        except ValueError as error:
            said[name] = str(error)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
