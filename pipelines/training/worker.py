"""What one rank does, from top to bottom; runs in a worker process of the launcher."""

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from conf.schema import RunConfig
from models.schedules import Schedule
from pipelines.dataset.manifest import Manifest
from pipelines.dataset.order import steps_per_epoch
from pipelines.launch import membership
from pipelines.launch.report import StoppedOnRequest, report
from pipelines.remote_path import AnyPath
from pipelines.sample import TRAINING_SPLIT
from pipelines.tracking.environment import host_facts
from pipelines.tracking.models import averaged_model_uri
from pipelines.tracking.store import TrackedRun
from pipelines.tracking.system import SystemSampler
from pipelines.training.checkpoint import TrainingState, newest_step
from pipelines.training.collective import rank_of_job
from pipelines.training.epochs import EpochKeeper, EpochSaver, Place, make_progress_report
from pipelines.training.finders.shortage import Shortage, shortage_explained
from pipelines.training.gathering import gather_json
from pipelines.training.input import TrainingInput
from pipelines.training.kept_state import KERNELS, KeptRows
from pipelines.training.loop import Trainer, average_statistics, train_epoch
from pipelines.training.loss_scale import LossScale
from pipelines.training.modes.mode import Mode
from pipelines.training.modes.table import make_mode
from pipelines.training.observer import StepMeasurements, gather_phases, gpu_names, make_sampler
from pipelines.training.parts import (
    Parts,
    make_data,
    make_mixing,
    make_parts,
    make_seeds,
    make_trainer,
    trace_ahead,
    use_kernels,
)
from pipelines.training.peak import computer_of
from pipelines.training.phases import line_of
from pipelines.training.precision import tell_precision
from pipelines.training.rates import make_schedule
from pipelines.training.record import Record, epoch_metrics, totals_after
from pipelines.training.recovery import Recovery, is_lost_peer, make_recovery
from pipelines.training.results import Evaluation, TrainingSummary
from pipelines.training.resume import Checkpoints
from pipelines.training.selection import best_of, best_step, described, is_over
from pipelines.training.settings import recorded_settings
from pipelines.training.step import StepClocks
from pipelines.training.stop import StopAgreement
from pipelines.training.summary import summary_of
from pipelines.training.tracing.tracer import StepTracer
from pipelines.training.validation import make_validation, validation_images
from pipelines.training.warm_start import dataset_names
from pipelines.training.weight_average import WeightAverage

_log = logging.getLogger(__name__)


def train_worker(config: RunConfig, run: TrackedRun, checkpoint_folder: AnyPath) -> TrainingSummary:
    """Train on this rank; the same call on every rank.

    Args:
        config: The whole configuration.
        run: The MLflow run, to which rank 0 writes.
        checkpoint_folder: Folder or URL of this run's checkpoints, which every rank sees.

    Raises:
        FloatingPointError: Training diverged; names rank, step and the checkpoint to continue from.
        StoppedOnRequest: A rank was asked to stop; every rank stopped after the same step.
        MemoryError: This rank ran out of memory; names what would fit.
    """
    with shortage_explained(config) as shortage:
        return _train(config, run, checkpoint_folder, shortage)


def _train(config: RunConfig, run: TrackedRun, checkpoint_folder: AnyPath, shortage: Shortage) -> TrainingSummary:
    parts = make_parts(config)
    collective, manifest, model, exchange = parts.collective, parts.manifest, parts.model, parts.exchange
    data = make_data(config, parts)
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    _log_size(parts, steps)
    tell_precision(config.training.precision, collective)

    schedule, stop, clocks = make_schedule(config, steps), StopAgreement(collective), StepClocks()
    loss_scale = LossScale() if config.training.precision == "float16" else None
    average = WeightAverage(model, config.training.ema) if config.training.ema is not None else None
    mode = make_mode(config.training.mode, model, parts.optimizer, exchange, stop, steps_per_epoch=steps)
    trainer = make_trainer(
        config, parts, schedule, stop=stop, mode=mode, loss_scale=loss_scale, average=average, clocks=clocks
    )
    shortage.know(parts)
    validate = make_validation(config, manifest, model, collective, average)

    further = [*_variables(loss_scale), *_variables(average)]
    checkpoints = _make_checkpoints(config, parts, run, checkpoint_folder, data.order, mode, further)
    own = [*checkpoints.variables, *checkpoints.own, *exchange.variables]
    kernels = {KERNELS: use_kernels(config)}
    recovery = make_recovery(collective, own, mode, config.launch.recover_every_steps, kernels, trainer.reset)
    if membership.is_spare():
        assert recovery is not None, "the launcher holds spares where launch.recover asks for them"
        mode.begin()
        if parts.collective.group.size == 1:  # a group of ranks is known once they have joined
            trace_ahead(config, parts, trainer)
        start = recovery.take_over()
        record = _make_record(config, manifest, run, checkpoint_folder, schedule, newest_step(checkpoint_folder))
        if record is not None:
            record.go_on_after(start.step, recovery.replaced)
        measurements = StepMeasurements(clocks, record, parts.batch_norm_bytes)
    else:
        checkpoints.check_folder()
        start = checkpoints.restore(resumes=config.training.resume_run is not None)
        mode.begin()
        record = _make_record(config, manifest, run, checkpoint_folder, schedule, start.step)
        measurements = StepMeasurements(clocks, record, parts.batch_norm_bytes)
        facts = gather_json({**host_facts(), "devices": gpu_names()}, collective)
        if record is not None:
            record.write_ranks(facts)
            if start.epochs_done < config.training.epochs:
                report(event="compiling")  # the first step compiles, and reports nothing until it is done
        if recovery is not None:
            recovery.keep(start)
    sampler = make_sampler(config, measurements)
    tracer = _make_tracer(config, parts, record, checkpoint_folder, start.step)
    epochs = _Epochs(
        config,
        parts,
        data,
        trainer if tracer is None else tracer.of_trainer(trainer),
        tracer,
        stop,
        steps,
        validate,
        checkpoints,
        record,
        measurements,
        sampler,
        loss_scale,
        average,
        recovery,
    )
    with _ends_explained(checkpoints, record, sampler):
        history = _train_through(epochs, start)
    if record is None:
        return TrainingSummary("", history, "", 0)
    return _finish(config, parts, average, record, history, checkpoints)


def _train_through(epochs: "_Epochs", start: TrainingState) -> list[dict[str, float]]:
    """Train to the end; where a rank dies and its spare takes over, go on from what all ranks have kept."""
    while True:
        try:
            return epochs.train(start)
        except Exception as error:
            if epochs.recovery is None or not is_lost_peer(error):
                raise
            _log.warning("rank %d lost another rank", epochs.parts.collective.rank)
        # Outside the handler: the error holds on to the batches of the step that has failed.
        start = epochs.recovery.rejoin()
        if epochs.record is not None:
            epochs.record.go_on_after(start.step, epochs.recovery.replaced)


@dataclass(frozen=True)
class _Epochs:
    """The epochs of one run on this rank: training, validation, record, checkpoint."""

    config: RunConfig
    parts: Parts
    data: TrainingInput
    trainer: Trainer
    tracer: StepTracer | None
    stop: StopAgreement
    steps: int
    """Steps of one epoch."""
    validate: Callable[[], Mapping[str, Evaluation]]
    checkpoints: Checkpoints
    record: Record | None
    """None on all ranks but 0."""
    measurements: StepMeasurements
    sampler: SystemSampler | None
    loss_scale: LossScale | None
    average: WeightAverage | None
    recovery: Recovery | None

    def train(self, start: TrainingState) -> list[dict[str, float]]:
        """Train every epoch that is left; return the history, which is whole on rank 0 only."""
        history = list(start.history)
        has_trained, began = False, time.perf_counter()
        for epoch in range(start.epochs_done, self.config.training.epochs):
            if self._is_over(history):
                break
            if self.stop.is_requested_now():
                raise StoppedOnRequest(f"stopped after step {epoch * self.steps}")
            place = Place(epoch, self.config.training.epochs, self.steps, resumed_from=start)
            has_trained, began = True, self._train_one(place, history, began)
        if not has_trained:
            evaluations = self.validate()
            if self.record is not None:
                self.record.draw_again(history, evaluations, step=start.step)
        if self.tracer is not None:
            self.tracer.finish()
        return history

    def _is_over(self, history: list[dict[str, float]]) -> bool:
        selection = self.config.training.selection
        if selection.patience is None:
            return False
        # Only rank 0 knows the epochs of an earlier attempt.
        return bool(self.parts.collective.broadcast_number(int(is_over(history, selection))))

    def _train_one(self, place: Place, history: list[dict[str, float]], began: float) -> float:
        """Train and validate one epoch, which counts from the moment `began`; return when the next one begins."""
        config, model, collective, record = self.config, self.parts.model, self.parts.collective, self.record
        end = (place.epoch + 1) * self.steps
        every = config.training.checkpoint_every_steps
        saver = EpochSaver(self.checkpoints, model, self.average, record, history, place, every)
        batches = self.data.batches_of(place.epoch, place.start_step)
        keeper = None
        if self.recovery is not None:
            keeper = EpochKeeper(self.recovery, self.checkpoints.initial, history, place)
        trained = train_epoch(
            batches if self.tracer is None else self.tracer.of_batches(batches),
            self.trainer,
            first_step=place.epoch * self.steps + place.start_step,
            earlier=place.earlier,
            seeds_of=make_seeds(config, model, place.epoch),
            mixing=make_mixing(config, place.epoch),
            saver=saver if self.data.resumes_within_epoch else None,
            keeper=keeper,
            observer=self.measurements,
            report=make_progress_report(collective, place),
        )
        average_statistics(model, collective, self.average.statistics if self.average else ())
        evaluations = self.validate()
        measured = self.measurements.take(trained)
        phases = gather_phases(measured, collective)
        samples = gather_json(self.sampler.take() if self.sampler else [], collective)
        ended = time.perf_counter()
        totals = totals_after(
            history,
            config,
            steps=self.steps,
            payload_bytes=measured.payload_bytes,
            seconds=ended - began,
            compile_seconds=trained.compile_seconds if place.is_first else 0.0,
        )
        history.append(epoch_metrics(trained, phases, evaluations, self.loss_scale, totals))
        if record is not None:
            record.write_epoch(history, evaluations, phases, step=end, samples=samples)
            report(event="epoch", **place.fields, metrics=history[-1], where=line_of(phases))
        # Last: an epoch whose checkpoint exists is recorded and was reported.
        self.checkpoints.save(epochs_done=place.epoch + 1, step=end, history=history, evaluations=evaluations)
        if record is not None:
            record.hold(end)
        if keeper is not None:
            keeper.close_epoch()
        return ended


def _make_record(
    config: RunConfig, manifest: Manifest, run: TrackedRun, checkpoint_folder: AnyPath, schedule: Schedule, step: int
) -> Record | None:
    """What rank 0 writes to the run, of which a checkpoint holds so many steps; None on other ranks."""
    if rank_of_job() != 0:
        return None
    names, files = list(config.training.metrics), membership.kept_memory()
    shown, rows = validation_images(config, manifest), KeptRows(files[2]) if files else None
    return Record(run, checkpoint_folder, schedule, start_step=step, own_metrics=names, image_of=shown, rows=rows)


def _log_size(parts: Parts, steps: int) -> None:
    rows, rank, size = parts.manifest.splits[TRAINING_SPLIT].rows, parts.collective.rank, parts.collective.size
    each = f" of {parts.micro_batches} micro-batches" if parts.micro_batches > 1 else ""
    _log.info("rank %d of %d: %d training samples, %d steps per epoch%s", rank, size, rows, steps, each)


def _make_checkpoints(
    config: RunConfig,
    parts: Parts,
    run: TrackedRun,
    folder: AnyPath,
    order: str,
    mode: Mode,
    further: Sequence[keras.Variable],
) -> Checkpoints:
    """The checkpoints of this run; `further` are variables beside those of model, optimizer and mode."""
    manifest, selection = parts.manifest, config.training.selection
    initial = TrainingState(
        epochs_done=0,
        step=0,
        seed=config.training.seed,
        global_batch_size=config.global_batch_size,
        run_id=run.run_id,
        dataset_fingerprint=manifest.fingerprint,
        history=[],
        order=order,
        settings={**recorded_settings(config), **dataset_names(config, manifest)},
    )
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    best = functools.partial(best_step, config=selection, steps_per_epoch=steps) if selection.metric else None
    own = {id(variable) for variable in mode.own}
    trained = [variable for variable in parts.optimizer.variables if id(variable) not in own]
    variables = [*parts.model.variables, *trained, *further, *mode.shared]
    return Checkpoints(folder, initial, variables, parts.exchange, parts.collective, best, own=mode.own)


def _make_tracer(
    config: RunConfig, parts: Parts, record: Record | None, checkpoint_folder: AnyPath, done: int
) -> StepTracer | None:
    """What traces the steps of `training.trace_steps`; None where there are none."""
    training, marks = config.training, parts.exchange.marks
    if training.trace_steps is None or marks is None:
        return None
    write = record.write_trace if record is not None else lambda trace, profiles, step: None
    return StepTracer(
        training.trace_steps,
        done=done,
        marks=marks,
        collective=parts.collective,
        folder=checkpoint_folder.parent if isinstance(checkpoint_folder, Path) else None,
        write=write,
        profiles=training.tensorflow_profiler,
        about={"codec": config.exchange.codec.name, "jit_compile": training.jit_compile},
    )


def _variables(part: LossScale | WeightAverage | None) -> Sequence[keras.Variable]:
    return () if part is None else part.variables


@contextmanager
def _ends_explained(checkpoints: Checkpoints, record: Record | None, sampler: SystemSampler | None) -> Iterator[None]:
    """Write the steps that led to a divergence, and say how to continue."""
    try:
        yield
    except (FloatingPointError, StoppedOnRequest) as error:
        if isinstance(error, StoppedOnRequest):
            checkpoints.collective.sum(np.zeros(1))  # no rank ends before rank 0 has written the checkpoint
        # After a stop on request the steps since the checkpoint are trained, and then recorded, again.
        if record is not None and isinstance(error, FloatingPointError):
            record.write_last_steps(sampler.take() if sampler else [])
        # Raised without its cause, which says nothing more.
        raise type(error)(f"{error}; {checkpoints.how_to_continue()}") from None


def _finish(
    config: RunConfig,
    parts: Parts,
    average: WeightAverage | None,
    record: Record,
    history: list[dict[str, float]],
    checkpoints: Checkpoints,
) -> TrainingSummary:
    """Log the model of the chosen epoch, and that with averaged weights; on rank 0."""
    selection, manifest, model = config.training.selection, parts.manifest, parts.model
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    gradient_bytes = parts.exchange.payload_bytes([variable.value for variable in model.trainable_variables])
    best = best_of(history, selection) if selection.model == "best" else None
    epoch = len(history) if best is None else best.epoch
    if epoch < len(history):
        checkpoints.take_best(epoch * steps)
    tags = described(history, selection, config.training.epochs)
    computer = computer_of(model, config.training.precision, checkpoints.collective.size)
    model_uri, not_recorded = record.write_result(
        model,
        manifest,
        config,
        steps=len(history) * steps,
        model_steps=epoch * steps,
        tags=tags,
        summary=summary_of(history, config, manifest, computer),
        average=average,
        thresholds=checkpoints.thresholds(epoch * steps),
    )
    return TrainingSummary(
        model_uri,
        history,
        checkpoints.newest,
        gradient_bytes + parts.batch_norm_bytes,
        averaged_model_uri=averaged_model_uri(model_uri) if model_uri and average else "",
        model_epoch=epoch,
        ended=tags.get("training_ended", ""),
        not_recorded=not_recorded,
    )
