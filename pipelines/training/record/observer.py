"""The figures that every rank measures in each step; rank 0 also records them."""

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from pipelines.training.record.run_recorder import RunRecorder
from pipelines.training.step.loop import EpochResult
from pipelines.training.step.step import StepClocks, StepFigures


class StepMeasurements:
    """Collects the figures of each step of an epoch; see `StepObserver`."""

    def __init__(self, clocks: StepClocks, recorder: RunRecorder | None, further_bytes: int = 0) -> None:
        """Start a new epoch.

        Args:
            clocks: The clocks that measure the step.
            recorder: Records each step; None on ranks other than 0.
            further_bytes: Payload of a step in addition to that of the gradients.
        """
        self._clocks, self._recorder, self._further_bytes = clocks, recorder, further_bytes
        self._steps: list[StepFigures] = []
        self.steps_done = 0
        """Number of optimizer steps of the run so far."""
        self.payload_bytes = 0.0
        """Payload of the epoch's steps that were recorded here."""

    def measure(self) -> tf.Tensor:
        """See `StepObserver`."""
        return self._clocks.figures

    def record_step(self, step: int, loss: float, measured: tf.Tensor) -> None:
        """See `StepObserver`."""
        figures = StepFigures.from_row(np.asarray(measured).tolist())
        payload = figures.exchange.payload_bytes + self._further_bytes
        self._steps.append(figures)
        self.payload_bytes += payload
        self.steps_done = step + 1
        if self._recorder is not None:
            self._recorder.write_step(step, loss, figures.exchange._replace(payload_bytes=payload))

    def go_on_after(self, step: int) -> None:
        """Drop the steps of the epoch: the in-memory checkpoint has the earlier ones, later ones are trained again.

        Args:
            step: Number of optimizer steps after which training continues in place.
        """
        self._steps, self.steps_done, self.payload_bytes = [], step, 0.0

    def take(self, trained: EpochResult) -> NDArray[np.float64]:
        """Return this rank's mean seconds per measured step of an epoch, and start the next epoch.

        The row `(1, 7)` has wall time, input, encode, collective, decode, optimizer, and the time from the last
        gradient to the end of the step; see `StepFigures`. The collective is sending, receiving and waiting for other
        ranks.

        Args:
            trained: The epoch.
        """
        # An epoch that was stopped after its last step has no steps here when it is resumed.
        steps = self._steps[-trained.measured_steps :]
        self._steps, self.payload_bytes = [], 0.0
        sums = [
            trained.measured_seconds,
            trained.input_wait_fraction * trained.measured_seconds,
            sum(each.exchange.encode_seconds for each in steps),
            sum(each.exchange.collective_seconds for each in steps),
            sum(each.exchange.decode_seconds for each in steps),
            sum(each.optimizer_seconds for each in steps),
            sum(each.after_gradients_seconds for each in steps),
        ]
        return np.array([sums]) / max(trained.measured_steps, 1)


def gpu_names() -> list[str]:
    """Return the names of this rank's GPUs; empty on a CPU."""
    return [
        tf.config.experimental.get_device_details(device).get("device_name", device.name)
        for device in tf.config.list_physical_devices("GPU")
    ]
