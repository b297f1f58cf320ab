"""What stands for a training: steps of a fixed length, recorded exactly as rank 0 and the driver record real ones."""

import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from conf.load import load
from jobs.shell.display import TrainingDisplay
from pipelines.sample import TRAINING_SPLIT
from pipelines.tracking.journal.system import SystemSampler
from pipelines.tracking.metrics import VALIDATION_GROUP
from pipelines.tracking.models.model_metadata import ModelMetadata
from pipelines.tracking.models.models import log_model
from pipelines.tracking.store.store import TrackedRun, TrackingError, worker_environment
from pipelines.training.driver.run import recorded_run
from pipelines.training.ranks.results import Evaluation, TrainingSummary
from pipelines.training.record.epoch_metrics import epoch_metrics
from pipelines.training.record.observer import StepMeasurements
from pipelines.training.record.phases import divide
from pipelines.training.record.run_recorder import RunRecorder
from pipelines.training.setup.recipe import make_mode
from pipelines.training.step.loop import EpochResult
from pipelines.training.step.step import Step, StepClocks
from tests.benchmarks.parts.training import Alone, timed
from tests.patience import patient
from tests.pipelines.training.manifests import rgb_manifest

STEP_SECONDS = 0.05
_CLASSES = [f"class {number}" for number in range(19)]
_MANIFEST = rgb_manifest(splits={TRAINING_SPLIT: (64,) * 19}, task="multi_label", class_names=tuple(_CLASSES))
_THREADS = ("tracking", "pictures", "system")
_RATE = 0.1

Points = dict[str, list[tuple[int, float]]]
"""Steps and values, by metric."""


@dataclass
class Trained:
    """One training that was recorded."""

    run: TrackedRun
    folder: Path
    points: Points
    """What the store must have."""
    seconds: float
    """Wall time of all steps."""
    waited: float
    """How much of it the steps waited for calls of the record."""
    thread_seconds: float
    """Processor time meanwhile of the threads that record and sample."""
    end_seconds: float
    """Wall time from the last step to the end of the run."""
    told: list[str] = field(default_factory=list)
    """Lines that a user sees of the server."""


class _Watch:
    """Sums the time that calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **settings)
        finally:
            self.seconds += time.perf_counter() - started


def train(
    output: Path, epochs: int, steps: int, *, offline: bool = False, at_step: Callable[[int], None] | None = None
) -> Trained:
    """Take steps of 50 ms and record them; return when the run has ended as well as the store allows.

    A small model is logged at the end.

    Args:
        output: As `training.output`.
        epochs: Number of epochs.
        steps: Steps of each.
        offline: As `tracking.offline`.
        at_step: Called before each step, and not counted.
    """
    config = load("smoke", [f"training.output={output}", f"tracking.offline={str(offline).lower()}"])
    watch, display, told = _Watch(), TrainingDisplay(), list[str]()
    trained = None
    ended = time.perf_counter()

    with ExitStack() as stack:
        stack.enter_context(mock.patch("jobs.shell.display.say", told.append))
        stack.enter_context(mock.patch("pipelines.training.record.run_recorder.tell", display))
        stack.enter_context(suppress(TrackingError))  # what the store has not taken is in the journal
        driver = stack.enter_context(recorded_run(config, _MANIFEST, display.tracking))
        with mock.patch.dict(os.environ, {} if offline else worker_environment()):
            record = RunRecorder(driver.run, driver.checkpoints, lambda step: _RATE, start_step=0)
            measurements = StepMeasurements(StepClocks(), record)
            measurements.measure()  # the first call prepares TensorFlow, which the first step of a training does
            assert config.tracking.system_seconds is not None, "sampling is on by default"
            sampler = SystemSampler(config.tracking.system_seconds, lambda: measurements.steps_done)
            loop = _Loop(record, measurements, sampler, watch, at_step or (lambda step: None))
            started = time.perf_counter()
            points = loop.take_steps(epochs, steps)
            ended = time.perf_counter()
            threads = [thread for thread in threading.enumerate() if thread.name in _THREADS]
            trained = Trained(driver.run, driver.folder, points, ended - started, watch.seconds, _processor(threads), 0)
            sampler.close()
            _, reason = record.write_end({}, {}, steps=epochs * steps, log_model=partial(log_small_model, driver.run))
        driver.finish(TrainingSummary("", [{}], "step.npz", 1, not_recorded=reason))
    assert trained is not None
    trained.end_seconds = time.perf_counter() - ended
    trained.told = [line for line in told if line.startswith("MLflow")]
    for thread in threads:  # a rank's process would end with them
        thread.join(patient(60))
    return trained


def log_small_model(run: TrackedRun) -> str:
    """Log a model of some kilobytes."""
    image = keras.Input((16,), name="image")
    return log_model(run, keras.Model({"image": image}, keras.layers.Dense(16)(image)), ModelMetadata(), None, step=1)


def seconds_of_figures(steps: int) -> float:
    """What the figures that are recorded add to the graph of a step, in seconds: median of so many steps."""
    images, targets = {"image": tf.ones((8, 16))}, tf.ones((8, 16))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    made = {has_figures: _small_step(StepClocks() if has_figures else None) for has_figures in seconds}
    for number in range(steps):
        for has_figures in seconds if number % 2 else reversed(seconds):
            seconds[has_figures] += timed(made[has_figures], images, targets, steps=1)
    return statistics.median(seconds[True]) - statistics.median(seconds[False])


def _small_step(clocks: StepClocks | None) -> Step:
    image = keras.Input((16,), name="image")
    model = keras.Model({"image": image}, keras.layers.Dense(16)(image))
    config = load("smoke", ["optimizer={name: sgd, momentum: 0.0, nesterov: false, weight_decay: 0.0}"])
    loss = keras.losses.mean_squared_error
    return make_mode(config, model, loss, Alone(), steps_per_epoch=1, clocks=clocks).step


@dataclass(frozen=True)
class _Loop:
    """Steps that only wait, recorded by what records real ones."""

    record: RunRecorder
    measurements: StepMeasurements
    sampler: SystemSampler
    watch: _Watch
    at_step: Callable[[int], None]

    def take_steps(self, epochs: int, steps: int) -> Points:
        """Take all steps; return what the store must have of them."""
        points: Points = {}
        history: list[dict[str, float]] = []
        for step in range(epochs * steps):
            self.at_step(step)
            begun = time.perf_counter()
            measured = self.watch(self.measurements.measure)
            time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - begun)))
            loss = 1.0 / (step + 1)
            self.watch(self.measurements.record_step, step, loss, measured)
            points.setdefault("train/step_loss", []).append((step, loss))
            points.setdefault("train/learning_rate", []).append((step, _RATE))
            if (step + 1) % steps == 0:
                self._end_epoch(history, loss, steps, step + 1)
                for name, value in history[-1].items():
                    points.setdefault(name, []).append((step + 1, value))
        return points

    def _end_epoch(self, history: list[dict[str, float]], loss: float, steps: int, step: int) -> None:
        rows = [{"class": name, "f1": loss, "average_precision": loss, "support": 10} for name in _CLASSES]
        evaluations = {VALIDATION_GROUP: Evaluation({"loss": loss, "f1_micro": loss, "f1_macro": loss}, rows)}
        phases = divide(np.array([[STEP_SECONDS, 0.001, 0.0, 0.0, 0.0, 0.002, 0.002]]))
        history.append(
            epoch_metrics(
                EpochResult(loss, 640.0, 0.02, steps, 5.0), phases, evaluations, None, {}, size=None, of_mode={}
            )
        )
        samples = [self.watch(self.sampler.take)]
        self.watch(self.record.write_epoch, history, evaluations, phases, step=step, samples=samples)
        self.watch(self.record.release, step)


def _processor(threads: list[threading.Thread]) -> float:
    """Processor time of threads that live, in seconds."""
    return sum(time.clock_gettime(time.pthread_getcpuclockid(each.ident)) for each in threads if each.ident)
