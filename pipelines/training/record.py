"""What rank 0 writes to the tracked run while it trains."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from conf.schema import RunConfig
from models.compression.exchange.exchange import METRICS, GradientExchange
from models.networks.model import with_probabilities
from models.schedules import Schedule
from pipelines.dataset.manifest import Manifest
from pipelines.launch.report import report
from pipelines.tracking.models import log_model
from pipelines.tracking.runs import has_value
from pipelines.tracking.store import TrackedRun
from pipelines.tracking.writer import RunWriter
from pipelines.training.loop import EpochResult
from pipelines.training.plots import learning_curves, learning_rate_curve, per_class_bars
from pipelines.training.results import Evaluation


class Record:
    """One run's curves by step and by epoch, its plots and its model."""

    def __init__(self, run: TrackedRun, schedule: Schedule, exchange: GradientExchange) -> None:
        """Connect."""
        self._run = run
        self._writer = RunWriter(run)
        self._schedule = schedule
        self._exchange = exchange
        self._points: dict[str, list[tuple[int, float]]] = {}

    def measure(self) -> tf.Tensor:
        """See `StepObserver`."""
        return self._exchange.measure()

    def record_step(self, step: int, loss: float, measured: tf.Tensor) -> None:
        """Keep one step until `write_steps`; see `StepObserver`."""
        values = dict(zip(map(_grouped, METRICS), measured.numpy().tolist(), strict=True))
        values |= {"train/learning_rate": self._schedule(step), "train/step_loss": loss}
        for name, value in values.items():
            if math.isfinite(value):
                self._points.setdefault(name, []).append((step, value))

    def write_steps(self) -> None:
        """Before each checkpoint: a run that goes on from there has all steps up to it."""
        self._writer.curves(self._points)
        self._points = {}

    def write_epoch(self, history: Sequence[dict[str, float]], evaluation: Evaluation | None) -> None:
        """Everything about the epoch that ended last."""
        self.write_steps()
        self._writer.metrics(history[-1], step=len(history))
        self._writer.figure(learning_curves(history), "learning_curves.png")
        if evaluation is not None:
            self._writer.table(evaluation.per_class, "per_class_validation.json")
            self._writer.figure(per_class_bars(evaluation.per_class, "validation"), "per_class_validation.png")

    def has_epoch(self, history: Sequence[dict[str, float]]) -> bool:
        """Whether MLflow has the metrics of the epoch that ended last."""
        return has_value(self._run, "train/loss", step=len(history))

    def write_result(self, model: keras.Model, manifest: Manifest, config: RunConfig, *, steps: int) -> str:
        """What is known at the end, after so many optimizer steps; the URI of the model."""
        self._writer.figure(learning_rate_curve([self._schedule(step) for step in range(steps)]), "learning_rate.png")
        report(event="saving")
        return log_model(
            self._run,
            with_probabilities(model, manifest.task),
            _model_description(manifest, config),
            config.tracking.registered_model,
            step=steps,
        )


def epoch_metrics(trained: EpochResult, evaluation: Evaluation | None) -> dict[str, float]:
    """One epoch's entry of the history."""
    metrics = {
        "train/loss": trained.loss,
        "speed/images_per_second": trained.images_per_second,
        "time/input_wait_fraction": trained.input_wait_fraction,
    }
    if evaluation is not None:
        metrics |= {f"val/{name}": value for name, value in evaluation.metrics.items()}
    return metrics


def _grouped(name: str) -> str:
    """Name in MLflow of one measurement of the exchange."""
    return f"time/{name}" if name.endswith("_seconds") else f"exchange/{name}"


def _model_description(manifest: Manifest, config: RunConfig) -> dict[str, Any]:
    """What whoever loads the model must know: the meaning of its outputs, and the data that it saw."""
    return {
        "task": manifest.task,
        "class_names": list(manifest.class_names),
        "dataset_fingerprint": manifest.fingerprint,
        "archive": manifest.archive,
        "network": config.model.model_dump(),
    }
