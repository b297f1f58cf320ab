"""Keras's metrics on the driver while workers train."""

import time
from typing import Any

import keras

from pipelines.launch.rank.report import log_to_driver


class LogCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Shows the start and end of each epoch on the driver, with its metrics; on request also each batch."""

    def __init__(self, per_batch_log: bool = False) -> None:
        """Show epochs, and also batches if `per_batch_log`."""
        super().__init__()
        self._per_batch_log = per_batch_log
        self._epoch = 0
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Show that the epoch begins."""
        self._epoch, self._began = epoch, time.monotonic()
        log_to_driver(f"epoch {epoch + 1} begins")

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Show the metrics of the batch if `per_batch_log`."""
        if self._per_batch_log:
            log_to_driver(f"epoch {self._epoch + 1}, batch {batch + 1}: {_metrics(logs)}")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Show the metrics of the epoch."""
        log_to_driver(f"epoch {epoch + 1} ends after {time.monotonic() - self._began:.1f} s: {_metrics(logs)}")


def _metrics(logs: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {float(value):.4f}" for name, value in (logs or {}).items()) or "no metrics"
