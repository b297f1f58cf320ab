"""The training of one rank from start to end; it runs in a worker process of the launcher."""

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from conf.schema import RunConfig
from conf.sections.dataset import ReaderConfig
from pipelines.dataset.read.reader import Batch
from pipelines.launch.rank import membership
from pipelines.launch.rank.report import StoppedOnRequest, signs_of_life
from pipelines.storage.folder import Location
from pipelines.tracking.journal.system import SystemSampler
from pipelines.tracking.models.models import averaged_model_uri
from pipelines.tracking.store.environment import host_facts
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.checkpoint.checkpoints import Checkpoints
from pipelines.training.checkpoint.in_memory import InMemoryRows, is_lost_peer
from pipelines.training.checkpoint.selection import best_of, described
from pipelines.training.checkpoint.state import TrainingState, newest_step
from pipelines.training.driver.export import log_trained
from pipelines.training.epochs import Epochs
from pipelines.training.memory.shortage import shortage_explained
from pipelines.training.rank_training import RankTraining, make_rank_training
from pipelines.training.ranks.collective import gather_json, job_of_one
from pipelines.training.ranks.events import Compiling, tell
from pipelines.training.ranks.results import TrainingSummary
from pipelines.training.record.observer import StepMeasurements, gpu_names
from pipelines.training.record.run_recorder import RunRecorder
from pipelines.training.record.summary import summary_of
from pipelines.training.setup.rank_setup import RankSetup, make_inputs
from pipelines.training.step.step import Traceable
from pipelines.training.tracing.peak import computer_of
from pipelines.training.tracing.tracer import StepTracer
from pipelines.training.validation import validation_images

_log = logging.getLogger(__name__)


def train_worker(
    config: RunConfig,
    run: TrackedRun,
    checkpoint_folder: Location,
    *,
    before_step: Callable[[RankTraining, int], None] = lambda rank, step: None,
) -> TrainingSummary:
    """Train on this rank; every rank makes the same call.

    Args:
        config: The whole configuration.
        run: The MLflow run that rank 0 writes to.
        checkpoint_folder: Folder or URL of this run's checkpoints. Every rank can read and write it.
        before_step: Called before each optimizer step with this rank and the number of completed steps.

    Raises:
        FloatingPointError: Training diverged. The error names rank, step and the checkpoint to continue from.
        StoppedOnRequest: A rank was asked to stop. Every rank stopped after the same step.
        MemoryError: This rank ran out of memory. The error names what would fit.
    """
    with shortage_explained(config.training) as shortage:
        rank = make_rank_training(config, run, checkpoint_folder, shortage)
        make_recorder = functools.partial(_make_recorder, config.dataset.path, config.reader, run, rank)
        if membership.is_spare():
            start, recorder = _take_over(rank, make_recorder, has_room=shortage.has_room())
        else:
            start, recorder = _begin(rank, make_recorder)
        measurements = StepMeasurements(rank.clocks, recorder, rank.setup.batch_norm_bytes)
        seconds = config.tracking.system_seconds
        epochs = Epochs(
            rank,
            recorder,
            measurements,
            sampler=None if seconds is None else SystemSampler(seconds, lambda: measurements.steps_done),
            tracer=_make_tracer(rank, config.exchange.codec.name, recorder, start.step),
            before_step=before_step,
        )
        with _ends_explained(rank.checkpoints, recorder, epochs.sampler):
            history = _train_through(epochs, start)
        if recorder is None:
            return TrainingSummary("", history, "", 0)
        with signs_of_life():  # writes to the store have the store's own time limits
            return _finish(config, run, rank, recorder, history)


def _begin(
    rank: RankTraining, make_recorder: Callable[[int], RunRecorder | None]
) -> tuple[TrainingState, RunRecorder | None]:
    """Start at the first step or resume from the newest checkpoint; return the state and rank 0's recorder."""
    rank.checkpoints.check_folder()
    restored = rank.checkpoints.restore(resumes=rank.training.resume_run is not None)
    start = restored.with_losses_of(rank.setup.collective.size, steps_per_epoch=rank.plan.steps)
    rank.mode.begin(start.step)
    recorder = make_recorder(start.step)
    facts = gather_json({**host_facts(), "devices": gpu_names()}, rank.setup.collective)
    if recorder is not None:
        recorder.write_ranks(facts)
        recorder.write_absent(start.history, steps=rank.plan.steps)
        if start.epochs_done < rank.training.epochs:
            tell(Compiling())  # the first step reports nothing until it finishes
    if rank.recovery is not None:
        rank.recovery.save(start)
    return start, recorder


def _take_over(
    rank: RankTraining, make_recorder: Callable[[int], RunRecorder | None], *, has_room: bool
) -> tuple[TrainingState, RunRecorder | None]:
    """Wait until the rank of this spare dies, then start from the in-memory checkpoint that all ranks have."""
    assert rank.recovery is not None, "the launcher has spares where launch.recover asks for them"
    rank.mode.begin(0)
    if rank.setup.collective.group.size == 1:  # the ranks of a group are known only after they have joined
        step_ahead(rank, has_room=has_room)
    start = rank.recovery.take_over()
    recorder = make_recorder(newest_step(rank.checkpoints.folder))
    if recorder is not None:
        recorder.go_on_after(start.step, rank.recovery.replaced)
    return start, recorder


def step_ahead(rank: RankTraining, *, has_room: bool) -> None:
    """Take steps on zeros in a spare before it replaces a rank; the first step of a size compiles its graphs.

    The steps belong to a job of only this process. The state that the spare takes over later overwrites their changes.
    A codec whose ranks gather each other's messages fails in such a step after encoding. A sharded optimizer fails
    after the gradients. The rest of the step is then compiled when the rank needs it.

    Args:
        rank: The rank that the spare may replace. The image size that is needed first is compiled first.
        has_room: Whether the memory is sufficient for a step. If not, the graphs are only traced.
    """
    steps: tuple[object, ...] = (rank.trainer.accumulate, rank.trainer.step)
    graphs = [graph for graph in steps if isinstance(graph, Traceable)]
    if not graphs or membership.is_turn():
        return
    # A spare that starts late skips the epochs that are done. After the last epoch no step is taken.
    left = rank.plan.sizes[newest_step(rank.checkpoints.folder) // rank.plan.steps :] or rank.plan.sizes[-1:]
    batch, began = _zeros(rank.setup, rank.training.batch_size_per_worker), time.monotonic()
    made = [make_inputs(rank.training, rank.setup.model, 0, size)(batch) for size in dict.fromkeys(left)]
    for inputs in made:
        if inputs is not made[0] and membership.is_turn():
            return
        for graph in graphs:
            graph.get_concrete_function(*inputs)
    if not has_room:
        return
    try:
        with job_of_one():
            for inputs, graph in itertools.product(made, graphs):
                if membership.is_turn():
                    return
                graph(*inputs)
    except (tf.errors.OpError, HorovodInternalError, ValueError) as error:
        _log.info("took a part of a step ahead: %s", str(error).partition("\n")[0])
    else:
        _log.info("took a step ahead (%.1f s)", time.monotonic() - began)


def _zeros(setup: RankSetup, size: int) -> Batch:
    """Return a batch for the model with `size` samples that are all zeros."""
    groups = [group for group in setup.manifest.groups if group.name in setup.model.input]
    return Batch(
        {group.name: np.zeros((size, *group.shape), group.dtype) for group in groups},
        np.zeros((size, len(setup.manifest.class_names)), np.uint8),
        np.ones(size, np.float32),
        np.zeros(size, np.int64),
    )


def _train_through(epochs: Epochs, start: TrainingState) -> list[dict[str, float]]:
    """Train to the end; after a spare takes over a dead rank, continue from the common in-memory checkpoint."""
    recovery = epochs.rank.recovery
    while True:
        try:
            return epochs.train(start)
        except Exception as error:
            is_lost = is_lost_peer(error)
            if is_lost and epochs.recorder is not None:
                epochs.recorder.write_unsaved_steps()
            if recovery is None or not is_lost:
                raise
            _log.warning("rank %d lost another rank", epochs.rank.setup.collective.rank)
        # Outside the handler, because the error refers to the batches of the failed step.
        start = recovery.rejoin()
        epochs.measurements.go_on_after(start.step)
        if epochs.recorder is not None:
            epochs.recorder.go_on_after(start.step, recovery.replaced)


def _make_recorder(
    dataset: str, reader: ReaderConfig, run: TrackedRun, rank: RankTraining, step: int
) -> RunRecorder | None:
    """Make rank 0's recorder. `step` is the number of steps that the checkpoint contains. Other ranks get None."""
    if rank.setup.collective.rank != 0:
        return None
    training, files = rank.training, membership.shared_memory_files()
    return RunRecorder(
        run,
        rank.checkpoints.folder,
        rank.trainer.schedule,
        start_step=step,
        own_metrics=[*training.metrics, *training.mode.declaration.metrics],
        image_of=validation_images(dataset, reader, rank.setup.manifest),
        rows=InMemoryRows(files[2]) if files else None,
    )


def _make_tracer(rank: RankTraining, codec: str, recorder: RunRecorder | None, done: int) -> StepTracer | None:
    """Make the tracer of the steps in `training.trace_steps`; return None if no steps are traced."""
    training, marks, folder = rank.training, rank.mode.exchange.marks, rank.checkpoints.folder
    if training.trace_steps is None or marks is None:
        return None
    return StepTracer(
        training.trace_steps,
        done=done,
        marks=marks,
        collective=rank.setup.collective,
        folder=folder.parent.path if folder.is_local else None,
        write=recorder.write_trace if recorder is not None else lambda trace, profiles, step: None,
        profiles=training.tensorflow_profiler,
        about={"codec": codec, "jit_compile": training.jit_compile},
    )


@contextmanager
def _ends_explained(
    checkpoints: Checkpoints, recorder: RunRecorder | None, sampler: SystemSampler | None
) -> Iterator[None]:
    """Write the steps that led to a divergence, and add to the error how to continue."""
    try:
        yield
    except (FloatingPointError, StoppedOnRequest) as error:
        if isinstance(error, StoppedOnRequest):
            checkpoints.collective.sum(np.zeros(1))  # no rank ends before rank 0 has written the checkpoint
        # After a stop on request, the steps since the checkpoint are trained and recorded again.
        if recorder is not None and isinstance(error, FloatingPointError):
            recorder.write_last_steps(sampler.take() if sampler else [])
        # The cause is left out because it adds no information.
        raise type(error)(f"{error}; {checkpoints.how_to_continue()}") from None


def _finish(
    config: RunConfig, run: TrackedRun, rank: RankTraining, recorder: RunRecorder, history: list[dict[str, float]]
) -> TrainingSummary:
    """Log the model of the chosen epoch and the model with averaged weights; only rank 0 calls this."""
    checkpoints, steps, selection = rank.checkpoints, rank.plan.steps, rank.training.selection
    manifest, model = rank.setup.manifest, rank.setup.model
    best = best_of(history, selection) if selection.model == "best" else None
    epoch = len(history) if best is None else best.epoch
    if epoch < len(history):
        checkpoints.take_best(epoch * steps)
    tags = described(history, selection, rank.training.epochs)
    computer = computer_of(model, rank.training.precision, checkpoints.collective.size)
    log_model = functools.partial(
        log_trained,
        run,
        model,
        manifest,
        config,
        step=epoch * steps,
        average=rank.average,
        thresholds=checkpoints.thresholds(epoch * steps),
    )
    model_uri, not_recorded = recorder.write_end(
        tags, summary_of(history, config, manifest, computer), steps=len(history) * steps, log_model=log_model
    )
    return TrainingSummary(
        model_uri,
        history,
        checkpoints.newest,
        rank.mode.payload_bytes() + rank.setup.batch_norm_bytes,
        averaged_model_uri=averaged_model_uri(model_uri) if model_uri and rank.average else "",
        model_epoch=epoch,
        ended=tags.get("training_ended", ""),
        not_recorded=not_recorded,
    )
