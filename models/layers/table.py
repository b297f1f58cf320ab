"""All augmentations by name.

A new augmentation is one file in this folder and one line in the table below. To be configurable it also has a class of
settings, with a line in the union, in `conf/sections/augmentations.py`.
"""

import functools
from collections.abc import Callable

import keras

from models.layers.augmentation import Augmentation
from models.layers.imported import ImportedAugmentation
from models.layers.pad_crop import PadCrop

AUGMENTATIONS: dict[str, Callable[..., keras.layers.Layer | None]] = {
    "none": lambda: None,
    "flips": functools.partial(Augmentation, "flips"),
    "dihedral": functools.partial(Augmentation, "dihedral"),
    "pad_crop": PadCrop,
    "import": ImportedAugmentation,
}
"""Constructors with the settings of the augmentation as keyword arguments, all of them required.

A constructor returns a layer without variables, called as `layer(images, seeds, training=training)`. The arguments are
a dict of image groups `(batch, height, width, bands)`, and one int32 per sample, whose bits are as good as random. The
result has image groups of the same dtypes and shapes. The layer draws from the seeds only. None stands for no
augmentation.
"""
