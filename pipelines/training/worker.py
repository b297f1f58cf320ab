"""What one rank does, from top to bottom; runs in a worker process of the launcher."""

import functools
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras

from conf.schema import RunConfig
from models.augmentation import augmentation_seeds
from models.losses import classification_loss
from models.resnet import with_probabilities
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.order import steps_per_epoch
from pipelines.dataset.reader import SplitReader
from pipelines.dataset.schema import TRAINING_SPLIT
from pipelines.launch.report import report
from pipelines.storage import Folder
from pipelines.tracking import RunWriter, TrackedRun, load_model
from pipelines.training.checkpoint import TrainingState, newest_checkpoint, restore, save_checkpoint
from pipelines.training.collective import HorovodCollective, use_assigned_devices
from pipelines.training.evaluation import evaluate
from pipelines.training.input import make_batches, reader_settings
from pipelines.training.loop import EpochResult, average_statistics, train_epoch
from pipelines.training.plots import learning_curves, learning_rate_curve, per_class_bars
from pipelines.training.recipe import make_exchange, make_model, make_optimizer, make_schedule
from pipelines.training.results import Evaluation, TrainingSummary
from pipelines.training.step import make_predict, make_train_step

VALIDATION_SPLIT = "validation"
_log = logging.getLogger(__name__)


def train_worker(config: RunConfig, run: TrackedRun, checkpoints: Path) -> TrainingSummary:
    """Train on this rank; the same call on every rank.

    Args:
        config: The whole configuration.
        run: Written by rank 0.
        checkpoints: Folder of this run's checkpoints, written by rank 0.
    """
    collective = HorovodCollective()
    use_assigned_devices()
    # The same seed everywhere: every rank builds the same weights, and the broadcast below makes sure.
    keras.utils.set_random_seed(config.training.seed)
    dataset = Folder.at(config.dataset.path)
    manifest = read_manifest(dataset)
    settings = reader_settings(config.reader)
    batches_of = make_batches(config, manifest, rank=collective.rank, size=collective.size)
    validation = SplitReader(dataset, VALIDATION_SPLIT, settings) if VALIDATION_SPLIT in manifest.splits else None
    rows = manifest.splits[TRAINING_SPLIT].rows
    steps = steps_per_epoch(rows, config.global_batch_size)

    _log.info("rank %d of %d: %d training samples, %d steps an epoch", collective.rank, collective.size, rows, steps)

    model = make_model(config, manifest)
    optimizer = make_optimizer(config.optimizer, model)
    loss = classification_loss(manifest.task)
    exchange = make_exchange(config, collective)
    step = make_train_step(model, loss, optimizer, exchange, jit_compile=config.training.jit_compile)
    predict = make_predict(model, jit_compile=config.training.jit_compile)
    schedule = make_schedule(config, steps)

    variables = [*model.variables, *optimizer.variables]
    history: list[dict[str, float]] = []
    first_epoch, checkpoint = 0, ""
    if config.training.resume_run is not None and collective.rank == 0:
        newest, state = newest_checkpoint(checkpoints)
        restore(newest, variables)
        history, first_epoch, checkpoint = list(state.history), state.epochs_done, str(newest)
    collective.broadcast([variable.value for variable in variables])
    first_epoch = collective.broadcast_number(first_epoch)

    writer = RunWriter(run) if collective.rank == 0 else None
    evaluation: Evaluation | None = None
    for epoch in range(first_epoch, config.training.epochs):
        batches = batches_of(epoch)
        place = {"epoch": epoch + 1, "epochs": config.training.epochs, "steps": steps}

        def tell(progress: Any, place: dict[str, int] = place) -> None:
            if collective.rank == 0:
                report(event="step", **place, **asdict(progress))

        seeds_of = functools.partial(augmentation_seeds, config.training.seed, epoch)
        trained = train_epoch(
            batches,
            step,
            optimizer,
            schedule,
            collective,
            first_step=epoch * steps,
            seeds_of=seeds_of if config.model.augmentation != "none" else None,
            report=tell,
        )
        average_statistics(model, collective)
        if validation is not None:
            evaluation = evaluate(
                predict,
                loss,
                validation,
                collective,
                batch_size=config.training.batch_size_per_worker,
                class_names=manifest.class_names,
                task=manifest.task,
            )
        if writer is not None:
            history.append(_epoch_metrics(trained, evaluation))
            state = TrainingState(
                epochs_done=epoch + 1,
                step=(epoch + 1) * steps,
                seed=config.training.seed,
                global_batch_size=config.global_batch_size,
                run_id=run.run_id,
                dataset_fingerprint=manifest.fingerprint,
                history=history,
            )
            checkpoint = str(save_checkpoint(checkpoints, state, variables))
            _write_epoch(writer, trained, history, evaluation, epoch, steps)
            report(event="epoch", **place, metrics=history[-1])

    if writer is None:
        return TrainingSummary("", history, checkpoint, 0)
    payload_bytes = exchange.payload_bytes([variable.value for variable in model.trainable_variables])
    rates = [schedule(number) for number in range(config.training.epochs * steps)]
    model_uri = _write_result(writer, model, manifest, config, rates, payload_bytes)
    return TrainingSummary(model_uri, history, checkpoint, payload_bytes)


def model_description(manifest: Manifest, config: RunConfig) -> dict[str, Any]:
    """What whoever loads the model must know: the meaning of its outputs, and the data that it saw."""
    return {
        "task": manifest.task,
        "class_names": list(manifest.class_names),
        "dataset_fingerprint": manifest.fingerprint,
        "archive": manifest.archive,
        "depth": config.model.depth,
    }


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


def _write_result(
    writer: RunWriter,
    model: keras.Model,
    manifest: Manifest,
    config: RunConfig,
    learning_rates: list[float],
    payload_bytes: int,
) -> str:
    """What is known at the end of a run; the URI of its model."""
    writer.figure(learning_rate_curve(learning_rates), "learning_rate.png")
    writer.metrics({"payload_bytes_per_step": payload_bytes}, step=0)
    report(event="saving")
    return writer.model(
        with_probabilities(model, manifest.task),
        model_description(manifest, config),
        config.tracking.registered_model,
    )


def _epoch_metrics(trained: EpochResult, evaluation: Evaluation | None) -> dict[str, float]:
    metrics = {
        "train_loss": trained.loss,
        "images_per_second": trained.images_per_second,
        "input_wait_fraction": trained.input_wait_fraction,
    }
    if evaluation is not None:
        metrics |= {f"val_{name}": value for name, value in evaluation.metrics.items()}
    return metrics


def _write_epoch(
    writer: RunWriter,
    trained: EpochResult,
    history: list[dict[str, float]],
    evaluation: Evaluation | None,
    epoch: int,
    steps: int,
) -> None:
    writer.metrics(history[-1], step=epoch + 1)
    writer.curves({"learning_rate": [(epoch * steps + i, rate) for i, rate in enumerate(trained.learning_rates)]})
    writer.figure(learning_curves(history), "learning_curves.png")
    if evaluation is not None:
        writer.table(evaluation.per_class, "per_class_validation.json")
        writer.figure(per_class_bars(evaluation.per_class, "validation"), "per_class_validation.png")
