"""What one rank does, from top to bottom; runs in a worker process of the launcher."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from conf.schema import RunConfig
from models.compression import kernels
from models.compression.exchange.exchange import GradientExchange
from models.layers.augmentation import AugmentedModel, augmentation_seeds
from models.layers.normalisation import normalise_over
from models.losses import Loss
from models.schedules import Schedule
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.order import steps_per_epoch
from pipelines.dataset.reader import SplitReader
from pipelines.launch.report import StoppedOnRequest, log_to_driver, report, step_done
from pipelines.sample import TRAINING_SPLIT
from pipelines.tracking.journal import rank_journal
from pipelines.tracking.models import AVERAGED_MODEL, load_model
from pipelines.tracking.store import TrackedRun
from pipelines.training.accumulation import Accumulation
from pipelines.training.checkpoint import TrainingState
from pipelines.training.collective import HorovodCollective, ranks_of_job, use_assigned_devices
from pipelines.training.evaluation import evaluate
from pipelines.training.finders.shortage import shortage_explained
from pipelines.training.input import TrainingInput, make_input, reader_settings
from pipelines.training.loop import LossTotal, Progress, SeedsOf, Trainer, average_statistics, train_epoch
from pipelines.training.loss_scale import LossScale
from pipelines.training.mixing import Mixing
from pipelines.training.objective import make_loss, make_metrics
from pipelines.training.precision import bfloat16_isa, describe_precision
from pipelines.training.rates import make_schedule
from pipelines.training.recipe import freeze_layers, make_exchange, make_model, make_optimizer, make_rate_factors
from pipelines.training.record import Record, epoch_metrics
from pipelines.training.results import Evaluation, TrainingSummary
from pipelines.training.resume import Checkpoints
from pipelines.training.selection import best_of, best_step, described, is_over
from pipelines.training.settings import recorded_settings
from pipelines.training.step import make_accumulate, make_predict, make_train_step
from pipelines.training.stop import StopAgreement
from pipelines.training.validation import make_validation
from pipelines.training.warm_start import begin_with, dataset_names
from pipelines.training.weight_average import WeightAverage

_log = logging.getLogger(__name__)


def train_worker(config: RunConfig, run: TrackedRun, checkpoint_folder: Path) -> TrainingSummary:
    """Train on this rank; the same call on every rank.

    Args:
        config: The whole configuration.
        run: The MLflow run, to which rank 0 writes.
        checkpoint_folder: Folder of this run's checkpoints, which every rank sees.

    Raises:
        FloatingPointError: Training diverged; names rank, step and the checkpoint to continue from.
        StoppedOnRequest: A rank was asked to stop; every rank stopped after the same step.
    """
    collective = join_ranks(config.model.batch_norm_span(ranks_of_job()))
    # The same seed on every rank builds the same weights, and the broadcast in `restore` makes sure of it.
    keras.utils.set_random_seed(config.training.seed)
    manifest = read_manifest(config.dataset.path)
    micro_batches = micro_batches_of(config, collective)
    data = make_input(config, manifest, rank=collective.rank, size=collective.size, micro_batches=micro_batches)
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    _log_size(collective, manifest, steps, micro_batches)
    _tell_precision(config, collective)

    model = make_model(config, manifest)
    if collective.group.size > 1:
        normalise_over(model, collective.group)
    begin_warm(config, manifest, model, collective)
    optimizer = make_optimizer(config.optimizer, model, gradient_clipping=config.training.gradient_clipping)
    loss = make_loss(config, manifest)
    agree_on_kernels(config, collective)
    exchange = make_exchange(config, collective)
    schedule = make_schedule(config, steps)
    loss_scale = LossScale() if config.training.precision == "float16" else None
    average = WeightAverage(model, config.training.ema) if config.training.ema is not None else None
    trainer = make_trainer(
        config, model, loss, optimizer, schedule, exchange, collective, micro_batches, loss_scale, average
    )
    validate = make_validation(config, manifest, model, collective, average)

    initial = _initial_state(config, manifest, run, data)
    variables = [*model.variables, *optimizer.variables]
    variables += [*(loss_scale.variables if loss_scale else []), *(average.variables if average else [])]
    selection = config.training.selection
    best = functools.partial(best_step, config=selection, steps_per_epoch=steps) if selection.metric else None
    checkpoints = Checkpoints(checkpoint_folder, initial, variables, exchange, collective, best)
    checkpoints.check_folder()
    start = checkpoints.restore(resumes=config.training.resume_run is not None)
    history = list(start.history)
    record = None
    if collective.rank == 0:
        journal, names = rank_journal(checkpoint_folder.parent), list(config.training.metrics)
        record = Record(run, journal, schedule, exchange, start_step=start.step, own_metrics=names)

    if record is not None and start.epochs_done < config.training.epochs:
        report(event="compiling")  # the first step compiles, and reports nothing until it is done
    shortage = shortage_explained(config, manifest, model, optimizer, exchange)
    with _ends_explained(checkpoints, record), shortage:
        for epoch in range(start.epochs_done, config.training.epochs):
            # Only rank 0 knows the epochs of an earlier attempt.
            if selection.patience is not None and collective.broadcast_number(int(is_over(history, selection))):
                break
            if trainer.stop is not None and trainer.stop.is_requested_now():
                raise StoppedOnRequest(f"stopped after step {epoch * steps}")
            place = _Place(epoch, config.training.epochs, steps, resumed_from=start)
            trained = train_epoch(
                data.batches_of(epoch, place.start_step),
                trainer,
                first_step=epoch * steps + place.start_step,
                earlier=place.earlier,
                seeds_of=make_seeds(config, model, epoch),
                mixing=Mixing(config.training.mixup, config.training.seed, epoch) if config.training.mixup else None,
                saver=_EpochSaver(
                    checkpoints, model, average, record, history, place, config.training.checkpoint_every_steps
                )
                if data.resumes_within_epoch
                else None,
                observer=record,
                report=_make_progress_report(collective, place),
            )
            average_statistics(model, collective, average.statistics if average else ())
            evaluations = validate()
            history.append(epoch_metrics(trained, evaluations, loss_scale))
            if record is not None:
                record.write_epoch(history, evaluations, step=(epoch + 1) * steps)
                report(event="epoch", **place.fields, metrics=history[-1])
            # Last: an epoch whose checkpoint exists is recorded and was reported.
            checkpoints.save(epochs_done=epoch + 1, step=(epoch + 1) * steps, history=history)
            if record is not None:
                record.hold((epoch + 1) * steps)
    if record is None:
        return TrainingSummary("", history, "", 0)
    return _finish(config, manifest, model, average, exchange, record, history, checkpoints)


def evaluate_worker(config: RunConfig, model_uri: str, split: str) -> Evaluation:
    """Score a logged model on one split; the same call on every rank."""
    collective = join_ranks()
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
        own_metrics=make_metrics(config.training.metrics),
    )


@dataclass(frozen=True)
class _Place:
    """Which epoch is trained, and what was done of it before this attempt."""

    epoch: int
    """Index of the epoch, from 0."""
    epochs: int
    steps: int
    """Steps of one epoch."""
    resumed_from: TrainingState

    @property
    def start_step(self) -> int:
        """Steps of this epoch that the checkpoint already has."""
        return self.resumed_from.step - self.epoch * self.steps if self._is_resumed else 0

    @property
    def earlier(self) -> LossTotal:
        """Losses of those steps."""
        return LossTotal(self.resumed_from.loss_sum, self.resumed_from.loss_count) if self._is_resumed else LossTotal()

    @property
    def fields(self) -> dict[str, int]:
        """What a report to the driver says of it."""
        return {"epoch": self.epoch + 1, "epochs": self.epochs, "steps": self.steps}

    @property
    def _is_resumed(self) -> bool:
        return self.epoch == self.resumed_from.epochs_done


@dataclass(frozen=True)
class _EpochSaver:
    """Writes checkpoints within an epoch; the one at its end is written when it has been evaluated."""

    checkpoints: Checkpoints
    model: keras.Model
    average: WeightAverage | None
    record: Record | None
    history: list[dict[str, float]]
    place: _Place
    every_steps: int | None

    def is_due(self, step: int) -> bool:
        """Whether the setting asks for a checkpoint after so many optimizer steps."""
        return self.every_steps is not None and step % self.every_steps == 0 and step % self.place.steps != 0

    def save(self, step: int, losses: LossTotal) -> None:
        """Write a checkpoint of an unfinished epoch; every rank makes the same call."""
        # A checkpoint holds one set of moving statistics, so that training is the same if it is resumed from here.
        averages = self.average.statistics if self.average else ()
        average_statistics(self.model, self.checkpoints.collective, averages)
        everyones = losses.over_ranks(self.checkpoints.collective)
        if self.record is not None:
            self.record.write_steps(step)
        self.checkpoints.save(
            epochs_done=self.place.epoch,
            step=step,
            history=self.history,
            loss_sum=everyones.sum,
            loss_count=everyones.count,
        )
        if self.record is not None:
            self.record.hold(step)


def join_ranks(batch_norm_span: int = 1) -> HorovodCollective:
    """Join the job, in groups of so many ranks, on the devices that the launcher assigned."""
    collective = HorovodCollective(batch_norm_span)
    use_assigned_devices()
    return collective


def micro_batches_of(config: RunConfig, collective: HorovodCollective) -> int:
    """Batches of this rank per step: fewer ranks than at the start take more of them each."""
    micro_batches = config.accumulation_steps(collective.size)
    assert micro_batches is not None, "the driver checks that the global batch divides"
    return micro_batches


def _log_size(collective: HorovodCollective, manifest: Manifest, steps: int, micro_batches: int) -> None:
    rows, rank, size = manifest.splits[TRAINING_SPLIT].rows, collective.rank, collective.size
    each = f" of {micro_batches} micro-batches" if micro_batches > 1 else ""
    _log.info("rank %d of %d: %d training samples, %d steps per epoch%s", rank, size, rows, steps, each)


def _tell_precision(config: RunConfig, collective: HorovodCollective) -> None:
    gpu = bool(tf.config.list_physical_devices("GPU"))
    text = describe_precision(config.training.precision, gpu=gpu, isa=bfloat16_isa())
    _log.info("rank %d: %s", collective.rank, text)
    if collective.rank == 0:
        log_to_driver(text)


def begin_warm(config: RunConfig, manifest: Manifest, model: keras.Model, collective: HorovodCollective) -> None:
    """Take the weights of an earlier training on rank 0, whose weights `restore` gives to all; freeze on every rank."""
    frozen = freeze_layers(config, model)
    if config.warm_start.source is None or config.training.resume_run is not None or collective.rank != 0:
        return
    lines = begin_with(model, config, manifest)
    if frozen:
        lines.append(f"{len(frozen)} layers are frozen: {', '.join(frozen)}")
    for line in lines:
        log_to_driver(line)


def make_trainer(
    config: RunConfig,
    model: keras.Model,
    loss: Loss,
    optimizer: keras.optimizers.Optimizer,
    schedule: Schedule,
    exchange: GradientExchange,
    collective: HorovodCollective,
    micro_batches: int,
    loss_scale: LossScale | None,
    average: WeightAverage | None,
) -> Trainer:
    """Make the training step of this rank, compiled when it is first called."""
    stop, jit_compile = StopAgreement(collective), config.training.jit_compile
    accumulation = Accumulation(model, micro_batches) if micro_batches > 1 else None
    step = make_train_step(
        model,
        loss,
        optimizer,
        exchange,
        jit_compile=jit_compile,
        stop=stop,
        accumulation=accumulation,
        loss_scale=loss_scale,
        average=average,
        rate_factors=make_rate_factors(config, model),
    )
    accumulate = None
    if accumulation is not None:
        accumulate = make_accumulate(model, loss, accumulation, jit_compile=jit_compile, loss_scale=loss_scale)
    return Trainer(step, optimizer, schedule, collective, stop, accumulate, micro_batches)


def _initial_state(config: RunConfig, manifest: Manifest, run: TrackedRun, data: TrainingInput) -> TrainingState:
    return TrainingState(
        epochs_done=0,
        step=0,
        seed=config.training.seed,
        global_batch_size=config.global_batch_size,
        run_id=run.run_id,
        dataset_fingerprint=manifest.fingerprint,
        history=[],
        order=data.order,
        settings={**recorded_settings(config), **dataset_names(config, manifest)},
    )


def agree_on_kernels(config: RunConfig, collective: HorovodCollective) -> None:
    """Use the C++ kernels on every rank or on none: ranks decode alone, and other code gives other last digits."""
    if config.exchange.codec.name in kernels.CODECS:
        (loaded,) = collective.sum(np.array([int(kernels.load() is not None)]))
        if loaded < collective.size:
            if loaded:
                _log.warning("%d of %d ranks have C++ kernels for compression: none uses them", loaded, collective.size)
            kernels.disable()


def make_seeds(config: RunConfig, model: keras.Model, epoch: int) -> SeedsOf | None:
    """Return the function from rows to the seeds of their augmentation; None if the model does not augment."""
    if not isinstance(model, AugmentedModel):
        return None
    return functools.partial(augmentation_seeds, config.training.seed, epoch)


def _make_progress_report(collective: HorovodCollective, place: _Place) -> Callable[[Progress], None]:
    """Return the function that reports rank 0's progress to the driver, and a sign of life from every other rank."""

    def report_progress(progress: Progress) -> None:
        if collective.rank == 0:
            report(event="step", **place.fields, **{**asdict(progress), "step": place.start_step + progress.step})
        else:
            step_done()

    return report_progress


@contextmanager
def _ends_explained(checkpoints: Checkpoints, record: Record | None) -> Iterator[None]:
    """Write the steps that led to a divergence, and say how to continue."""
    try:
        yield
    except (FloatingPointError, StoppedOnRequest) as error:
        if isinstance(error, StoppedOnRequest):
            checkpoints.collective.sum(np.zeros(1))  # no rank ends before rank 0 has written the checkpoint
        # After a stop on request the steps since the checkpoint are trained, and then recorded, again.
        if record is not None and isinstance(error, FloatingPointError):
            record.write_last_steps()
        # Raised without its cause, which says nothing more.
        raise type(error)(f"{error}; {checkpoints.how_to_continue()}") from None


def _finish(
    config: RunConfig,
    manifest: Manifest,
    model: keras.Model,
    average: WeightAverage | None,
    exchange: GradientExchange,
    record: Record,
    history: list[dict[str, float]],
    checkpoints: Checkpoints,
) -> TrainingSummary:
    """Log the model of the chosen epoch, and that with averaged weights; on rank 0."""
    selection = config.training.selection
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    payload_bytes = exchange.payload_bytes([variable.value for variable in model.trainable_variables])
    best = best_of(history, selection) if selection.model == "best" else None
    epoch = len(history) if best is None else best.epoch
    if epoch < len(history):
        checkpoints.take_best(epoch * steps)
    tags = described(history, selection, config.training.epochs)
    model_uri, not_recorded = record.write_result(
        model, manifest, config, steps=len(history) * steps, model_steps=epoch * steps, tags=tags, average=average
    )
    return TrainingSummary(
        model_uri,
        history,
        checkpoints.newest,
        payload_bytes,
        averaged_model_uri=f"runs:/{checkpoints.initial.run_id}/{AVERAGED_MODEL}" if model_uri and average else "",
        model_epoch=epoch,
        ended=tags.get("training_ended", ""),
        not_recorded=not_recorded,
    )
