"""A trial of user-defined parts: they are built once in a separate process before any rank starts.

So the driver imports no TensorFlow, takes no GPU memory, and survives any failure of these parts.
"""

import logging
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.schema import RunConfig
from conf.sections.codecs import CodecConfig, NoneConfig
from conf.sections.optimizers import LayerwiseConfig, OptimizerConfig
from conf.sections.training import TrainingConfig, WarmStartConfig
from models.imported import described
from models.layers.grids import Size
from pipelines.dataset.format.manifest import Manifest
from pipelines.training.setup.resolution import part_sizes

if TYPE_CHECKING:
    from models.layers.augmentation import AugmentedModel
    from models.metrics import Metric

_SECONDS = 600
_REFUSED = 9
_WARNING = "groundswell: "
"""The prefix of a line for the user; code by import path may print other lines."""
_log = logging.getLogger(__name__)


def has_own_parts(config: RunConfig) -> bool:
    """Return whether the training has a part by import path or names layers, which only the model can check."""
    training, warm_start = config.training, config.warm_start
    return "import" in (config.model.name, config.input.augmentation.name, training.loss.name) or any(
        (
            training.metrics,
            training.mode.declaration.implementation,
            warm_start.frozen_layers,
            warm_start.rate_factors,
        )
    )


def try_parts(config: RunConfig, manifest: Manifest) -> None:
    """Build the parts with an import path and the model to log, in another process.

    Raises:
        ValueError: A part is not found, raises an exception, or does not fit. The text has one line.
        RuntimeError: The process failed in another way, or took too long.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "pipelines.training.driver.trial"],
            input=pickle.dumps((config, manifest)),
            env=environment,
            capture_output=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"building the model took more than {_SECONDS} seconds: see the parts by import path"
        ) from None
    if done.returncode == _REFUSED:
        raise ValueError(done.stdout.decode().splitlines()[-1])
    if done.returncode:
        last = (done.stderr.decode().strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"building the model ended with exit code {done.returncode}: {last}")
    for line in done.stdout.decode().splitlines():
        if line.startswith(_WARNING):
            _log.warning("%s", line.removeprefix(_WARNING))


def build_parts(config: RunConfig, manifest: Manifest) -> list[str]:
    """Build the model of the training and the model that is logged at its end; return notes for the user.

    Raises:
        ValueError: A part does not fit.
    """
    from models.layers.augmentation import AugmentedModel
    from models.layers.normalisation import batch_norms_over_ranks
    from models.networks.model import with_probabilities
    from pipelines.training.modes.table import check_model_of_mode
    from pipelines.training.setup.recipe import freeze_layers, make_model, make_rate_factors

    path = str(config.model.arguments().get("path"))
    model = make_model(config, manifest)
    _check_paths(
        model, _identified_by_path(config.warm_start, config.optimizer, config.exchange.codec, config.training), path
    )
    freeze_layers(config.warm_start, model)
    make_rate_factors(config.warm_start, model)
    _try_objective(config.training, manifest)
    if isinstance(model, AugmentedModel) and model.augmentation is not None:
        # Not the layer itself, because Keras would turn an error into several lines.
        model.augmentation.call(*_two_samples(model), training=True)
    if config.model.name == "import":
        network = model.network if isinstance(model, AugmentedModel) else model
        _try_sizes(network, part_sizes(config.input, config.model, manifest), len(manifest.class_names), path)
        _check_gradients(network, path)
    if config.model.batch_norm_ranks != 1:
        try:
            batch_norms_over_ranks(model)
        except ValueError as error:
            setting = f"model.batch_norm_ranks={config.model.batch_norm_ranks}"
            raise ValueError(f"{setting}: {error}, or set model.batch_norm_ranks=1") from None
    check_model_of_mode(config.training.mode, model, _two_samples(model))
    try:
        with_probabilities(model, manifest.task)
    except Exception as error:  # layers without a `get_config` of their arguments
        raise ValueError(
            f"model.path={path}: the trained model could not be saved, as its layers "
            f"cannot be made again from their configuration ({described(error)})"
        ) from error
    return _notes(model) if config.model.name == "import" else []


def _check_gradients(network: Any, path: str) -> None:
    """Refuse a network that stops the gradients of trainable variables."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        logits = network(_two_samples(network)[0], training=True)
    gradients = tape.gradient(logits, [each.value for each in network.trainable_variables])
    without = [
        each.path for each, gradient in zip(network.trainable_variables, gradients, strict=True) if gradient is None
    ]
    if without:
        raise ValueError(
            f"model.path={path}: {len(without)} trainable variables have no gradient, such "
            f"as {without[0]}: set trainable=False in their layers, or let the gradients pass"
        )


def _notes(model: Any) -> list[str]:
    import keras

    return [
        f"layer {layer.name} of the network scales its images, and gets those that are normalised already: a network "
        "for pixels from 0 to 255 learns worse so"
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Rescaling)
    ]


def _check_paths(model: Any, setting: str, path: str) -> None:
    """Refuse variables with the same path, as in two nested networks, if a setting identifies variables by path.

    Args:
        model: The model.
        setting: The setting; empty if there is none, see `_identified_by_path`.
        path: `model.path`, for the error text.
    """
    # A warm start also loads statistics. The other settings concern trained variables only.
    identified = model.variables if setting == "warm_start.source" else model.trainable_variables
    twice = [found for found, count in Counter(each.path for each in identified).items() if count > 1]
    if setting and twice:
        raise ValueError(
            f"model.path={path}: {len(twice)} paths belong to several variables each, "
            f"such as {twice[0]}, and {setting} tells variables apart by their paths: rename layers"
        )


def _identified_by_path(
    warm_start: WarmStartConfig, optimizer: OptimizerConfig, codec: CodecConfig, training: TrainingConfig
) -> str:
    """Return the setting that identifies variables by their paths; empty if there is none."""
    settings = {
        f"optimizer={optimizer.name}": isinstance(optimizer, LayerwiseConfig),
        f"exchange.codec={codec.name}": not isinstance(codec, NoneConfig),
        f"training.mode={training.mode.name}": training.mode.declaration.keeps_by_path,
        "warm_start.source": warm_start.source is not None,
        "training.ema": training.ema is not None,
    }
    return next((setting for setting, identifies in settings.items() if identifies), "")


def _try_sizes(network: Any, sizes: Sequence[Size], classes: int, path: str) -> None:
    """Run a network by import path in training mode on two samples of each size in the resolution schedule."""
    from models.layers.resolution import training_size

    for size in sizes:
        try:
            with training_size(size):
                logits = network(_two_samples(network)[0], training=True)
        except Exception as error:  # the network's own layers may raise any exception
            reason = f"({described(error)})"
        else:
            if tuple(logits.shape) == (2, classes):
                continue
            reason = f"(its logits for two samples have the shape {tuple(logits.shape)})"
        raise ValueError(
            f"input.resolution_schedule has images of {size[0]} x {size[1]} pixels, and "
            f"model.path={path} cannot take them {reason}: leave it out, or let the "
            "network end with a mean over all pixels"
        )


def try_metrics(metrics: "Mapping[str, Metric]", manifest: Manifest) -> None:
    """Call metrics by import path on artificial samples, in this process.

    Raises:
        ValueError: A metric fails.
    """
    targets, logits = _made_up_samples(manifest)
    odds = np.exp(logits)
    probabilities = odds / (odds.sum(1, keepdims=True) if manifest.task == "single_label" else 1 + odds)
    for metric in metrics.values():
        metric(targets, probabilities)


def _made_up_samples(manifest: Manifest) -> tuple[Any, Any]:
    """Return targets and logits of artificial samples; each class has positive and negative samples."""
    targets = np.tile(np.eye(len(manifest.class_names), dtype=np.uint8), (2, 1))
    return targets, np.random.default_rng(0).normal(size=targets.shape).astype(np.float32)


def _try_objective(training: TrainingConfig, manifest: Manifest) -> None:
    """Call loss and metrics by import path on artificial samples."""
    from pipelines.training.setup.recipe import make_loss, make_metrics

    if training.loss.name == "import":
        targets, logits = _made_up_samples(manifest)
        losses = np.asarray(make_loss(training, manifest)(targets.astype(np.float32), logits))
        if losses.shape != (len(targets),):
            raise ValueError(
                f"training.loss.path={training.loss.arguments()['path']}: the function returned "
                f"{losses.shape[0]} losses for {len(targets)} samples"
            )
    try_metrics(make_metrics(training.metrics), manifest)


def _two_samples(model: "AugmentedModel") -> tuple[dict[str, Any], Any]:
    """Return images of zeros for each input of the model, and seeds."""
    import tensorflow as tf

    images = {name: tf.zeros((2, *each.shape[1:]), each.dtype) for name, each in model.input.items()}
    return images, tf.constant([1, 2], tf.int32)


def _main() -> None:
    config, manifest = pickle.loads(sys.stdin.buffer.read())
    try:
        for note in build_parts(config, manifest):
            print(f"{_WARNING}{note}")  # noqa: T201  for the driver
    except ValueError as error:
        print(" ".join(str(error).split()))  # noqa: T201  for the driver
        sys.exit(_REFUSED)


if __name__ == "__main__":
    _main()
