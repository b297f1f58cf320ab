"""All networks by name.

A new network is one file in this folder and one line in the table below. To be configurable it also has a class of
settings, with a line in the union, in `conf/sections/networks.py`.
"""

from collections.abc import Callable

import keras

from models.networks.airbench import airbench
from models.networks.imported import imported
from models.networks.resnet import resnet
from models.networks.resnet9 import resnet9
from models.networks.resnet_cifar import resnet_cifar

NETWORKS: dict[str, Callable[..., keras.KerasTensor]] = {
    "resnet": resnet,
    "resnet_cifar": resnet_cifar,
    "resnet9": resnet9,
    "airbench": airbench,
    "import": imported,
}
"""Functions from normalised images `(batch, height, width, bands)` to float32 logits `(batch, classes)`.

Their keyword arguments are `classes`, the settings of the network, all of them required, and `dtype`, the Keras dtype
policy of their layers.
"""
