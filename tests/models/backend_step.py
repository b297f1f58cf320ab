"""Training steps of every network, loss and layerwise optimizer under the backend that KERAS_BACKEND names.

Needs Keras and the backend only. Usage: backend_step.py WEIGHTS.npz RESULT.npz; weights that are not there are drawn.
Prints the backend, and what the parts that TensorFlow alone can compute say under another one.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from models.layers.augmentation import mix_pairs
from models.layers.meprop import MeProp
from models.layers.normalisation import normalise_over
from models.layers.preprocessing import InputGroup
from models.layers.table import AUGMENTATIONS
from models.losses import classification_loss
from models.networks.model import build_model, with_probabilities
from models.optimizers.layerwise import variables_with_roles
from models.optimizers.table import OPTIMIZERS

GROUPS = [
    InputGroup("bands_10m", (24, 24, 4), "uint16", (500.0,) * 4, (300.0,) * 4),
    InputGroup("bands_20m", (12, 12, 6), "uint16", (900.0,) * 6, (400.0,) * 6),
]
SAMPLES, CLASSES, RATE = 6, 5, 0.05
DECAYED = {"weight_decay": 1e-4}
NETWORKS = {
    "resnet": {"depth": 18, "width_factor": 0.125},
    "resnet_cifar": {"depth": 8, "width_factor": 0.5, "preactivation": True, "stem_stride": 1},
}
STEPS = (("lars", "multi_label", "resnet", 2), ("lamb", "single_label", "resnet_cifar", 1))
"""Optimizer, loss, network and number of steps."""
SETTINGS = {
    "lars": {
        "variant": "mlperf",
        "momentum": 0.9,
        "nesterov": True,
        "trust_coefficient": 0.02,
        "epsilon": 0.0,
        **DECAYED,
    },
    "lamb": {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-3, **DECAYED},
}


def batch(task: str) -> tuple[dict[str, Any], Any]:
    """Images and targets, the same under every backend."""
    random = np.random.default_rng(0)
    images = {group.name: random.integers(0, 2000, (SAMPLES, *group.shape)).astype(np.uint16) for group in GROUPS}
    if task == "multi_label":
        return images, random.integers(0, 2, (SAMPLES, CLASSES)).astype(np.float32)
    return images, np.eye(CLASSES, dtype=np.float32)[random.integers(0, CLASSES, SAMPLES)]


def gradients(model: keras.Model, task: str) -> tuple[Any, list[Any]]:
    """The loss of the batch with label smoothing, and its gradients; moves the batch-norm statistics."""
    images, targets = batch(task)
    loss = classification_loss(task, label_smoothing=0.1)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = ops.mean(loss(targets, model(images, training=True)))
        return value, tape.gradient(value, [variable.value for variable in model.trainable_variables])
    import jax

    def of(weights: list[Any], others: list[Any]) -> tuple[Any, list[Any]]:
        logits, others = model.stateless_call(weights, others, images, training=True)
        return ops.mean(loss(targets, logits)), others

    weights, others = ([v.value for v in part] for part in (model.trainable_variables, model.non_trainable_variables))
    (value, others), found = jax.value_and_grad(of, has_aux=True)(weights, others)
    for variable, moved in zip(model.non_trainable_variables, others, strict=True):
        variable.assign(moved)
    return value, found


def build(network: str, **settings: Any) -> keras.Model:
    """Build a network whose gains are 1: gains of zero would hide the residual branches."""
    keras.utils.set_random_seed(0)
    rates = {"dropout": 0.0, "stochastic_depth": 0.0, "zero_init_residual": True}
    chosen = {"upsampling": "bilinear", "augmentation": None, **rates, **NETWORKS[network], **settings}
    model = build_model(GROUPS, network=network, classes=CLASSES, **chosen)
    for variable in model.variables:
        if variable.path.endswith("gamma"):
            variable.assign(ops.ones(variable.shape))
    return model


def identity(images: Any, seeds: Any) -> Any:
    """An augmentation of somebody's own."""
    return images


def augment(name: str, **settings: Any) -> Any:
    """Let an augmentation of the table change images."""
    return AUGMENTATIONS[name](**settings)(batch("multi_label")[0], np.arange(SAMPLES, dtype=np.int32), training=True)  # type: ignore[misc]


REFUSED: dict[str, Callable[[], Any]] = {
    "a model that augments": lambda: build("resnet_cifar", augmentation=AUGMENTATIONS["flips"]()),
    "a model with dropout": lambda: build("resnet_cifar", dropout=0.1),
    "a model with stochastic depth": lambda: build("resnet_cifar", stochastic_depth=0.1),
    "dihedral": lambda: augment("dihedral"),
    "pad_crop": lambda: augment("pad_crop", padding=2, fill="zero", mirror=False, cutout=0),
    "import": lambda: augment("import", path=f"{__name__}:identity", settings={}),
    "batch norm over ranks": lambda: normalise_over(build("resnet_cifar"), None),  # type: ignore[arg-type]
    "mixup": lambda: mix_pairs(np.zeros((2, 3), np.float32), np.ones(2, np.float32)),
    "meprop": lambda: MeProp(keras.layers.Dense(4), 2)(np.zeros((2, 3), np.float32)),
}


def refusals() -> dict[str, str]:
    """What each part says."""
    said = dict.fromkeys(REFUSED, "it is computed")
    for name, part in REFUSED.items():
        try:
            part()
        except ValueError as error:
            said[name] = str(error)
    return said


def main(weights_file: str, result_file: str) -> None:
    """Take the steps and write what came of them."""
    models = {network: build(network) for network in NETWORKS}
    if not Path(weights_file).exists():
        np.savez(
            weights_file,
            **{
                f"{network}/{number}": ops.convert_to_numpy(variable)
                for network, model in models.items()
                for number, variable in enumerate(model.variables)
            },
        )
    with np.load(weights_file) as file:
        weights = dict(file)
    result: dict[str, Any] = {}
    for name, task, network, steps in STEPS:
        model = models[network]
        start = [weights[f"{network}/{number}"] for number in range(len(model.variables))]
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        small = variables_with_roles(model, ["bias", "gain", "shift"])
        optimizer = OPTIMIZERS[name](excluded=small, unadapted=small, **SETTINGS[name])
        optimizer.build(model.trainable_variables)
        optimizer.learning_rate = RATE
        for _ in range(steps):
            value, found = gradients(model, task)
            optimizer.apply(found, model.trainable_variables)
        result[f"{name}/loss"] = ops.convert_to_numpy(value)
        for number, (variable, old) in enumerate(zip(model.variables, start, strict=True)):
            result[f"{name}/moved/{number}"] = ops.convert_to_numpy(variable) - old
        served = with_probabilities(model, task)
        result[f"{name}/probabilities"] = ops.convert_to_numpy(served(batch(task)[0]))
    np.savez(result_file, **result)
    backend = keras.backend.backend()
    print(json.dumps([backend, {} if backend == "tensorflow" else refusals()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
