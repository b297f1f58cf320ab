"""Results that workers send to the driver, which imports this module: nothing here imports TensorFlow."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split, the same on every rank."""

    metrics: dict[str, float]
    per_class: list[dict[str, Any]]
    """Rows of `models.metrics.per_class_table`."""


@dataclass(frozen=True)
class TrainingSummary:
    """One finished training."""

    model_uri: str
    """Where MLflow has the model; empty where it has not taken it, and on ranks other than 0."""
    history: list[dict[str, float]]
    """Metrics of each epoch."""
    checkpoint: str
    """Path of the newest checkpoint."""
    payload_bytes_per_step: int
    """Bytes that one rank gives to the collective in each step; only rank 0 has this and the model's URI."""
    not_recorded: str = ""
    """Why MLflow has not taken everything; empty where it has."""
    averaged_model_uri: str = ""
    """Where MLflow has the model with averaged weights; empty without `training.ema` too."""
    model_epoch: int = 0
    """Number of the epoch whose weights the model has, from 1; 0 on ranks other than 0."""
    ended: str = ""
    """Why training ended; empty where epochs are not compared."""
