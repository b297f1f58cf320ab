"""One rank of `convergence`: trainings one after the other in one process."""

import gc
import statistics
import time

import keras
import numpy as np
from cifar10.methods import (
    BATCH_SIZE,
    CLASSES,
    CROP_MARGIN,
    DEPTH,
    EPOCHS,
    EPOCHS_PER_EVALUATION,
    IS_SMOKE,
    METHODS,
    RANKS,
    STEPS_PER_EPOCH,
    WIDTH_FACTOR,
    fingerprint,
    overrides,
)

from conf.load import resolve
from conf.sections.networks import ResNetCifarConfig, ResNetConfig
from models.layers.meprop import MeProp
from models.layers.preprocessing import InputGroup
from models.networks.resnet import BLOCKS_PER_STAGE
from pipelines.dataset.format.order import epoch_order, evaluation_parts, rank_parts
from pipelines.dataset.read.reader import Batch
from pipelines.launch.rank.report import report
from pipelines.training.modes.server_step import ServerStep
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.setup.rates import make_schedule
from pipelines.training.step.loop import StepHooks, Trainer, train_epoch
from pipelines.training.step.step import make_predict
from pipelines.training.step.tensors import image_tensors
from tests.benchmarks.parts import training


def train_all(runs, data_path):
    """On every rank: one training after the other; rank 0 reports each."""
    collective = HorovodCollective()
    with np.load(data_path) as arrays:
        data = dict(arrays)
    for name, seed in runs:
        result = train_and_forget(METHODS[name], seed, data, collective)
        if collective.rank == 0:
            report(method=name, seed=seed, fingerprint=fingerprint(METHODS[name], seed), **result)


def train_and_forget(method, seed, data, collective):
    """What `train` gives; what TensorFlow keeps of a training is given back."""
    result = train(method, seed, data, collective)
    keras.backend.clear_session()
    gc.collect()
    return result


def train(method, seed, data, collective):
    """Accuracy, loss and seconds in steps of each epoch; payload and its ratio, seconds in all."""
    started = time.perf_counter()
    config = resolve("smoke", overrides(method, seed))  # one set-up for all codecs, `none` too
    keras.utils.set_random_seed(seed)
    pixels = data["train_images"]
    group = InputGroup("rgb", pixels.shape[1:], "uint8", tuple(pixels.mean((0, 1, 2))), tuple(pixels.std((0, 1, 2))))
    BLOCKS_PER_STAGE[DEPTH] = (1, 1, 1, 1)
    network, settings = ResNetConfig(width_factor=WIDTH_FACTOR), {"depth": DEPTH}
    if IS_SMOKE:
        network, settings = ResNetCifarConfig(depth=2, width_factor=0.5), {}
    model = training.network([group], network, CLASSES, precision=config.training.precision, **settings)
    if method.meprop is not None:
        model = sparsify_backward_pass(model, method.meprop)
    mode = training.configured_training(config, model, collective, "single_label", STEPS_PER_EPOCH)
    exchange, server = mode.exchange, mode.server if isinstance(mode, ServerStep) else None
    mode.begin(0)
    predict = make_predict(model, jit_compile=False)
    trainer = Trainer(mode.step, mode.optimizer, make_schedule(config, STEPS_PER_EPOCH), collective)
    accuracies, losses, metrics, training_seconds = [], [], [], []
    payload = PayloadSum(mode if server else exchange) if method.mode is not None else None
    for epoch in range(EPOCHS):
        batches = augmented_batches(data["train_images"], data["train_labels"], seed, epoch, collective)
        result = train_epoch(batches, trainer, first_step=epoch * STEPS_PER_EPOCH, hooks=StepHooks(observer=payload))
        losses.append(round(result.loss, 4))
        # The first step of the first epoch compiles: it counts as any other.
        seconds = result.measured_seconds * STEPS_PER_EPOCH / max(result.measured_steps, 1)
        training_seconds.append(round(seconds, 2))
        if (epoch + 1) % EPOCHS_PER_EVALUATION == 0:
            mode.come_together()
            metrics.append(exchange.metrics())
            accuracies.append(accuracy(predict, data["test_images"], data["test_labels"], collective))
    if server is not None:
        server.close()
    if payload is None:
        sent = statistics.median(each.payload_bytes for each in metrics)
        ratio = statistics.median(each.compression_ratio for each in metrics)
    else:
        sent = payload.total / (EPOCHS * STEPS_PER_EPOCH)
        ratio = 4 * training.elements(model) / sent
    return {
        "accuracy": accuracies,
        "loss": losses,
        "payload_bytes": sent,
        "ratio": round(ratio, 2),
        "residual_norm": [round(each.residual_norm, 4) for each in metrics],
        "training_seconds": training_seconds,
        "seconds": round(time.perf_counter() - started, 1),
    }


class PayloadSum:
    """Adds up the payload of every step, of which most have none where ranks train alone."""

    def __init__(self, sender):
        self.sender, self.total = sender, 0.0

    def measure(self):
        return [self.sender.payload_bytes()] if isinstance(self.sender, ServerStep) else self.sender.measure()

    def record_step(self, step, loss, measured):
        self.total += float(measured[0])


def sparsify_backward_pass(model, part):
    """The model with new weights, meProp around each convolution."""

    def wrap(layer):
        copy = layer.from_config(layer.get_config())
        return MeProp(copy, max(1, round(part * layer.filters))) if isinstance(layer, keras.layers.Conv2D) else copy

    return keras.models.clone_model(model, clone_function=wrap)


def augmented_batches(images, labels, seed, epoch, collective):
    """This rank's batches of one epoch: random crops of images that were padded, half of them mirrored."""
    margins = ((0, 0), (CROP_MARGIN, CROP_MARGIN), (CROP_MARGIN, CROP_MARGIN), (0, 0))
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(images, margins, "reflect"), images.shape[1:3], (1, 2))  # type: ignore[call-overload]
    random = np.random.default_rng([seed, epoch, collective.rank])
    order = epoch_order([len(images)], seed=seed, epoch=epoch)
    parts = rank_parts(
        order, global_batch_size=RANKS * BATCH_SIZE, rank=collective.rank, size=collective.size, start_step=0
    )
    for rows in parts:
        top, left = random.integers(0, 2 * CROP_MARGIN + 1, (2, len(rows)))
        batch = windows[rows, top, left].transpose(0, 2, 3, 1)
        mirrored = random.random(len(rows)) < 0.5
        batch[mirrored] = batch[mirrored, :, ::-1]
        one_hot = np.eye(CLASSES, dtype=np.uint8)[labels[rows]]
        yield Batch({"rgb": np.ascontiguousarray(batch)}, one_hot, np.ones(len(rows), np.float32), rows)


def accuracy(predict, images, labels, collective):
    """Of all test images; each rank predicts its part."""
    parts = evaluation_parts(len(images), batch_size=500, rank=collective.rank, size=collective.size)
    correct = sum(int(np.sum(np.argmax(predict(image_tensors({"rgb": images[p]})), 1) == labels[p])) for p in parts)
    return int(collective.sum(np.array([correct]))[0]) / len(images)
