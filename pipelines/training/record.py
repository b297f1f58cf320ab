"""What rank 0 writes to the tracked run while it trains."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from conf.schema import RunConfig
from models.compression.exchange.exchange import METRICS, GradientExchange
from models.networks.model import with_probabilities
from models.schedules import Schedule
from pipelines.dataset.manifest import Manifest
from pipelines.launch.report import report
from pipelines.tracking.delivery import News
from pipelines.tracking.metrics import VALIDATION_GROUP
from pipelines.tracking.models import AVERAGED_MODEL, MODEL, log_model
from pipelines.tracking.store import TrackedRun, TrackingError
from pipelines.tracking.writer import Point, RunWriter, now
from pipelines.training.bands import seen_bands
from pipelines.training.loop import EpochResult
from pipelines.training.loss_scale import LossScale
from pipelines.training.plots import learning_curves, learning_rate_curve, per_class_bars
from pipelines.training.results import Evaluation
from pipelines.training.weight_average import WeightAverage


class Record:
    """One run's curves by step and by epoch, its plots and its model."""

    def __init__(
        self,
        run: TrackedRun,
        journal: Path,
        schedule: Schedule,
        exchange: GradientExchange,
        *,
        start_step: int,
        own_metrics: Sequence[str] = (),
    ) -> None:
        """Begin to write beside training.

        Args:
            run: The run.
            journal: Folder where everything waits until MLflow has taken it.
            schedule: Learning rate by optimizer step.
            exchange: The exchange that is measured.
            start_step: Optimizer steps of the checkpoint from which training continues; 0 at its start.
            own_metrics: Names of the user's own metrics.
        """
        self._run = run
        self._writer = RunWriter(run, journal, restart_step=start_step, on_news=_tell_driver, own_metrics=own_metrics)
        self._writer.start()
        self._schedule = schedule
        self._exchange = exchange
        self._points: dict[str, list[Point]] = {}

    def measure(self) -> tf.Tensor:
        """See `StepObserver`."""
        return self._exchange.measure()

    def record_step(self, step: int, loss: float, measured: tf.Tensor) -> None:
        """Keep one step until `write_steps`; see `StepObserver`."""
        values = dict(zip(map(_grouped, METRICS), measured.numpy().tolist(), strict=True))
        values |= {"train/learning_rate": self._schedule(step), "train/step_loss": loss}
        measured_at = now()
        for name, value in values.items():
            if math.isfinite(value):
                self._points.setdefault(name, []).append(Point(step, value, measured_at))

    def write_steps(self, step: int) -> None:
        """Write what is known of the steps so far, before the checkpoint that holds `step` optimizer steps."""
        self._writer.curves(self._points, after_step=step)
        self._points = {}

    def write_last_steps(self) -> None:
        """Write the steps that led to a failure, which no checkpoint will hold; the driver delivers them."""
        self.write_steps(0)
        self._writer.hold(sys.maxsize)

    def write_epoch(
        self, history: Sequence[dict[str, float]], evaluations: Mapping[str, Evaluation], *, step: int
    ) -> None:
        """Write everything about the epoch that ended last, before its checkpoint.

        Args:
            history: Metrics of each epoch so far.
            evaluations: What `Validate` returned after the epoch.
            step: Optimizer steps at the end of the epoch.
        """
        self.write_steps(step)
        self._writer.metrics(history[-1], step=step, after_step=step)
        self._writer.figure(learning_curves(history), "learning_curves.png", after_step=step)
        evaluation = evaluations.get(VALIDATION_GROUP)
        if evaluation is not None:
            self._writer.table(evaluation.per_class, "per_class_validation.json", after_step=step)
            bars = per_class_bars(evaluation.per_class, "validation")
            self._writer.figure(bars, "per_class_validation.png", after_step=step)

    def hold(self, step: int) -> None:
        """Say that a checkpoint holds so many optimizer steps: what was written about them goes to MLflow."""
        self._writer.hold(step)

    def write_result(
        self,
        model: keras.Model,
        manifest: Manifest,
        config: RunConfig,
        *,
        steps: int,
        model_steps: int,
        tags: Mapping[str, str],
        average: WeightAverage | None = None,
    ) -> tuple[str, str]:
        """Write what is known at the end, the model last.

        Args:
            model: The trained model.
            manifest: Its dataset.
            config: The whole configuration.
            steps: Optimizer steps in all.
            model_steps: Those that the model has seen.
            tags: Tags of the run about its end.
            average: The average of its weights, which is logged as a model of its own, before the other one.

        Returns:
            The URI of the model and an empty text; or an empty URI, and why MLflow has not taken everything.
        """
        self._writer.tags(tags)
        self._writer.figure(learning_rate_curve([self._schedule(step) for step in range(steps)]), "learning_rate.png")
        report(event="saving")
        reason = self._writer.drain()
        if reason:
            return "", reason
        self._writer.close()
        description, task = _model_description(manifest, config), manifest.task
        try:
            if average is not None:
                with average.in_model():
                    averaged = with_probabilities(model, task)
                described = {**description, "ema": average.decay}
                log_model(self._run, averaged, described, None, step=model_steps, name=AVERAGED_MODEL)
            registered = config.tracking.registered_model
            uri = log_model(
                self._run, with_probabilities(model, task), description, registered, step=model_steps, name=MODEL
            )
        except TrackingError as error:
            return "", str(error)
        return uri, ""


def epoch_metrics(
    trained: EpochResult, evaluations: Mapping[str, Evaluation], loss_scale: LossScale | None
) -> dict[str, float]:
    """One epoch's entry of the history; `evaluations` have the groups of their metrics as keys."""
    metrics = {
        "train/loss": trained.loss,
        "speed/images_per_second": trained.images_per_second,
        "time/input_wait_fraction": trained.input_wait_fraction,
    }
    if loss_scale is not None:
        metrics["train/skipped_steps"] = float(loss_scale.skipped)
    for group, evaluation in evaluations.items():
        metrics |= {f"{group}/{name}": value for name, value in evaluation.metrics.items()}
    return metrics


def _tell_driver(news: News, reason: str) -> None:
    report(event="tracking", news=news, reason=reason)


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
        "bands": seen_bands(manifest.groups, config.input.bands),
    }
