"""What one rank does, from top to bottom; runs in a worker process of the launcher."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from conf.schema import RunConfig
from models.compression import kernels
from models.layers.augmentation import augmentation_seeds
from models.losses import classification_loss
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.order import steps_per_epoch
from pipelines.dataset.reader import SplitReader
from pipelines.launch.report import report, step_done
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.tracking.models import load_model
from pipelines.tracking.store import TrackedRun
from pipelines.training.checkpoint import TrainingState
from pipelines.training.collective import HorovodCollective, use_assigned_devices
from pipelines.training.evaluation import evaluate
from pipelines.training.input import make_input, reader_settings
from pipelines.training.loop import Progress, average_statistics, train_epoch
from pipelines.training.recipe import make_exchange, make_model, make_optimizer, make_schedule
from pipelines.training.record import Record, epoch_metrics
from pipelines.training.results import Evaluation, TrainingSummary
from pipelines.training.resume import Checkpoints
from pipelines.training.step import make_predict, make_train_step

_log = logging.getLogger(__name__)


def train_worker(config: RunConfig, run: TrackedRun, checkpoint_folder: Path) -> TrainingSummary:
    """Train on this rank; the same call on every rank.

    Args:
        config: The whole configuration.
        run: Written by rank 0.
        checkpoint_folder: Of this run, seen by every rank.
    """
    collective = HorovodCollective()
    use_assigned_devices()
    # The same seed everywhere: every rank builds the same weights, and a broadcast makes sure.
    keras.utils.set_random_seed(config.training.seed)
    manifest = read_manifest(config.dataset.path)
    data = make_input(config, manifest, rank=collective.rank, size=collective.size)
    rows = manifest.splits[TRAINING_SPLIT].rows
    steps = steps_per_epoch(rows, config.global_batch_size)
    _log.info("rank %d of %d: %d training samples, %d steps an epoch", collective.rank, collective.size, rows, steps)

    model = make_model(config, manifest)
    optimizer = make_optimizer(config.optimizer, model)
    loss = classification_loss(manifest.task)
    _agree_on_kernels(config, collective)
    exchange = make_exchange(config, collective)
    step = make_train_step(model, loss, optimizer, exchange, jit_compile=config.training.jit_compile)
    schedule = make_schedule(config, steps)
    validate = _make_validation(config, manifest, model, loss, collective)
    checkpoints = Checkpoints(
        checkpoint_folder,
        TrainingState(
            epochs_done=0,
            step=0,
            seed=config.training.seed,
            global_batch_size=config.global_batch_size,
            run_id=run.run_id,
            dataset_fingerprint=manifest.fingerprint,
            history=[],
            order=data.order,
        ),
        [*model.variables, *optimizer.variables],
        exchange,
        collective,
    )
    start = checkpoints.restore(resumes=config.training.resume_run is not None)
    history = list(start.history)

    record = Record(run, schedule, exchange) if collective.rank == 0 else None
    if record is not None and start.epochs_done < config.training.epochs:
        report(event="compiling")  # which the first step does, in silence
    for epoch in range(start.epochs_done, config.training.epochs):
        resumed = epoch == start.epochs_done
        start_step = start.step - epoch * steps if resumed else 0
        place = {"epoch": epoch + 1, "epochs": config.training.epochs, "steps": steps}
        seeds_of = functools.partial(augmentation_seeds, config.training.seed, epoch)
        with _steps_kept(record):
            trained = train_epoch(
                data.batches_of(epoch, start_step),
                step,
                optimizer,
                schedule,
                collective,
                first_step=epoch * steps + start_step,
                seeds_of=seeds_of if config.model.augmentation != "none" else None,
                earlier=(start.loss_sum, start.loss_count) if resumed else (0.0, 0),
                checkpoint_every=config.training.checkpoint_every_steps,
                checkpoint=_make_saver(checkpoints, model, epoch, steps, history, record),
                report=_make_teller(collective, place, start_step),
                watch=record,
            )
        average_statistics(model, collective)
        evaluation = validate()
        history.append(epoch_metrics(trained, evaluation))
        if record is not None:
            record.write_epoch(history, evaluation)
            report(event="epoch", **place, metrics=history[-1])
        # Last: an epoch whose checkpoint is there has been told.
        checkpoints.save(epochs_done=epoch + 1, step=(epoch + 1) * steps, history=history)

    if record is None:
        return TrainingSummary("", history, "", 0)
    payload_bytes = exchange.payload_bytes([variable.value for variable in model.trainable_variables])
    model_uri = record.write_result(model, manifest, config, steps=config.training.epochs * steps)
    return TrainingSummary(model_uri, history, checkpoints.newest, payload_bytes)


def _agree_on_kernels(config: RunConfig, collective: HorovodCollective) -> None:
    """Every rank computes the result for itself: by the same code, or last digits differ and ranks drift apart."""
    if config.exchange.codec.name in kernels.CODECS:
        (loaded,) = collective.sum(np.array([int(kernels.load() is not None)]))
        if loaded < collective.size:
            if loaded:
                _log.warning("%d of %d ranks have C++ kernels for compression: none uses them", loaded, collective.size)
            kernels.disable()


@contextmanager
def _steps_kept(record: Record | None) -> Iterator[None]:
    """Where training diverges, the steps that led there are written."""
    try:
        yield
    except FloatingPointError:
        if record is not None:
            record.write_steps()
        raise


def _make_validation(
    config: RunConfig,
    manifest: Manifest,
    model: keras.Model,
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    collective: HorovodCollective,
) -> Callable[[], Evaluation | None]:
    """Return what scores the validation split on all ranks; None where the dataset has none."""
    if VALIDATION_SPLIT not in manifest.splits:
        return lambda: None
    reader = SplitReader(config.dataset.path, VALIDATION_SPLIT, reader_settings(config.reader))
    predict = make_predict(model, jit_compile=config.training.jit_compile)
    return lambda: evaluate(
        predict,
        loss,
        reader,
        collective,
        batch_size=config.training.batch_size_per_worker,
        class_names=manifest.class_names,
        task=manifest.task,
    )


def _make_saver(
    checkpoints: Checkpoints,
    model: keras.Model,
    epoch: int,
    steps: int,
    history: list[dict[str, float]],
    record: Record | None,
) -> Callable[[int, float, int], None]:
    """Return what writes a checkpoint within an epoch; the one at its end is written when it has been evaluated."""
    collective = checkpoints.collective

    def save(step: int, loss_sum: float, loss_count: int) -> None:
        if step % steps == 0:
            return
        # One set of moving statistics, as a checkpoint holds one: the same whether or not it is resumed from.
        average_statistics(model, collective)
        total, count = collective.sum(np.array([loss_sum, loss_count], np.float64))
        if record is not None:
            record.write_steps()
        checkpoints.save(epochs_done=epoch, step=step, history=history, loss_sum=float(total), loss_count=int(count))

    return save


def _make_teller(collective: HorovodCollective, place: dict[str, int], start_step: int) -> Callable[[Progress], None]:
    """Return what tells the driver how far rank 0 is, and that the others are alive."""

    def tell(progress: Progress) -> None:
        if collective.rank == 0:
            report(event="step", **place, **{**asdict(progress), "step": start_step + progress.step})
        else:
            step_done()

    return tell


def evaluate_worker(config: RunConfig, model_uri: str, split: str) -> Evaluation:
    """Score a logged model on one split; the same call on every rank."""
    collective = HorovodCollective()
    use_assigned_devices()
    model, description = load_model(model_uri)
    reader = SplitReader(config.dataset.path, split, reader_settings(config.reader))
    return evaluate(
        make_predict(model, jit_compile=False),
        None,
        reader,
        collective,
        batch_size=config.training.batch_size_per_worker,
        class_names=description["class_names"],
        task=description["task"],
        from_logits=False,
    )
