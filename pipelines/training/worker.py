"""What one rank does, from top to bottom; runs in a worker process of the launcher."""

import functools
import logging
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np

from conf.schema import RunConfig
from models.augmentation import augmentation_seeds
from models.compression.exchange import GradientExchange
from models.compression.resize import load_state, save_state
from models.losses import classification_loss
from models.resnet import with_probabilities
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.order import steps_per_epoch
from pipelines.dataset.reader import SplitReader
from pipelines.dataset.schema import TRAINING_SPLIT
from pipelines.launch.report import attempt, report, step_done
from pipelines.storage import Folder
from pipelines.tracking import RunWriter, TrackedRun, load_model
from pipelines.training.checkpoint import (
    TrainingState,
    check_rank_states,
    newest_checkpoint,
    read_rank_states,
    restore,
    save_checkpoint,
    save_rank_state,
)
from pipelines.training.collective import HorovodCollective, use_assigned_devices
from pipelines.training.evaluation import evaluate
from pipelines.training.input import make_batches, reader_settings
from pipelines.training.loop import EpochResult, Progress, average_statistics, train_epoch
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
    start, checkpoint = _newest_state(config, checkpoints, variables) if collective.rank == 0 else (None, "")
    collective.broadcast([variable.value for variable in variables])
    history = list(start.history) if start else []
    steps_done = collective.broadcast_number(start.step if start else 0)
    first_epoch = collective.broadcast_number(start.epochs_done if start else 0)
    has_exchange_state = bool(exchange.codec.collectives)
    saved_ranks = collective.broadcast_number(start.exchange_ranks if start else 0)
    if has_exchange_state and saved_ranks:
        load_state(exchange, read_rank_states(checkpoints / f"step-{steps_done:08d}.npz", saved_ranks))

    def save(epochs_done: int, step_number: int, loss_sum: float = 0.0, loss_count: int = 0) -> None:
        nonlocal checkpoint
        if has_exchange_state:
            save_rank_state(checkpoints, step_number, collective.rank, save_state(exchange))
            collective.sum(np.zeros(1))  # the parts of all ranks are there before the checkpoint that counts on them
            if collective.rank == 0:
                check_rank_states(checkpoints, step_number, collective.size)
        if collective.rank == 0:
            state = TrainingState(
                epochs_done=epochs_done,
                step=step_number,
                seed=config.training.seed,
                global_batch_size=config.global_batch_size,
                run_id=run.run_id,
                dataset_fingerprint=manifest.fingerprint,
                history=history,
                loss_sum=loss_sum,
                loss_count=loss_count,
                exchange_ranks=collective.size if has_exchange_state else 0,
            )
            checkpoint = str(save_checkpoint(checkpoints, state, variables))

    writer = RunWriter(run) if collective.rank == 0 else None
    evaluation: Evaluation | None = None
    for epoch in range(first_epoch, config.training.epochs):
        start_step = max(0, steps_done - epoch * steps)
        place = {"epoch": epoch + 1, "epochs": config.training.epochs, "steps": steps}

        def tell(progress: Progress, place: dict[str, int] = place, before: int = start_step) -> None:
            if collective.rank == 0:
                report(event="step", **place, **{**asdict(progress), "step": before + progress.step})
            else:
                step_done()

        def save_within(number: int, loss_sum: float, loss_count: int, epoch: int = epoch) -> None:
            if number % steps:
                # One set of moving statistics, as a checkpoint holds one: the same whether or not it is resumed from.
                average_statistics(model, collective)
                total, count = collective.sum(np.array([loss_sum, loss_count], np.float64))
                save(epoch, number, float(total), int(count))

        seeds_of = functools.partial(augmentation_seeds, config.training.seed, epoch)
        trained = train_epoch(
            batches_of(epoch, start_step),
            step,
            optimizer,
            schedule,
            collective,
            first_step=epoch * steps + start_step,
            seeds_of=seeds_of if config.model.augmentation != "none" else None,
            earlier=(start.loss_sum, start.loss_count) if start and start_step else (0.0, 0),
            checkpoint_every=config.training.checkpoint_every_steps,
            checkpoint=save_within,
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
        history.append(_epoch_metrics(trained, evaluation, exchange))
        if writer is not None:
            rates = [(number, schedule(number)) for number in range(epoch * steps, (epoch + 1) * steps)]
            _write_epoch(writer, rates, history, evaluation)
            report(event="epoch", **place, metrics=history[-1])
        # Last: an epoch whose checkpoint is there has been told.
        save(epoch + 1, (epoch + 1) * steps)

    if writer is None:
        return TrainingSummary("", history, checkpoint, 0)
    payload_bytes = exchange.payload_bytes([variable.value for variable in model.trainable_variables])
    planned = [schedule(number) for number in range(config.training.epochs * steps)]
    model_uri = _write_result(writer, model, manifest, config, planned, payload_bytes)
    return TrainingSummary(model_uri, history, checkpoint, payload_bytes)


def _newest_state(
    config: RunConfig, checkpoints: Path, variables: list[keras.Variable]
) -> tuple[TrainingState | None, str]:
    """Restore the newest checkpoint where this run or attempt goes on from one; its state and path."""
    if config.training.resume_run is None and attempt() == 1:
        return None, ""
    try:
        newest, state = newest_checkpoint(checkpoints)
    except FileNotFoundError:
        if config.training.resume_run is not None:
            raise
        _log.warning("no checkpoint was written before the failure: attempt %d starts anew", attempt())
        return None, ""
    restore(newest, variables)
    _log.info("going on from %s: epoch %d, step %d", newest, state.epochs_done + 1, state.step)
    return state, str(newest)


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


def _epoch_metrics(trained: EpochResult, evaluation: Evaluation | None, exchange: GradientExchange) -> dict[str, float]:
    metrics = {
        "train_loss": trained.loss,
        "images_per_second": trained.images_per_second,
        "input_wait_fraction": trained.input_wait_fraction,
    }
    # Of the epoch's last step.
    last = exchange.metrics()
    metrics |= {f"exchange_{name}": value for name, value in last.items() if math.isfinite(value)}
    if evaluation is not None:
        metrics |= {f"val_{name}": value for name, value in evaluation.metrics.items()}
    return metrics


def _write_epoch(
    writer: RunWriter,
    learning_rates: list[tuple[int, float]],
    history: list[dict[str, float]],
    evaluation: Evaluation | None,
) -> None:
    writer.metrics(history[-1], step=len(history))
    writer.curves({"learning_rate": learning_rates})
    writer.figure(learning_curves(history), "learning_curves.png")
    if evaluation is not None:
        writer.table(evaluation.per_class, "per_class_validation.json")
        writer.figure(per_class_bars(evaluation.per_class, "validation"), "per_class_validation.png")
