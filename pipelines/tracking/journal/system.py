"""Samples of processor, memory, disk, network and GPUs of a rank's machine, taken as MLflow takes them."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

from pipelines.tracking.journal.writer import Point, now
from pipelines.tracking.metrics import SYSTEM_GROUP

Sample = tuple[int, int, dict[str, float]]
"""Step, milliseconds since 1970, values by MLflow's names."""
DEVICES = Path("/dev")
"""Folder in which a GPU without its library is visible."""
_log = logging.getLogger(__name__)


class SystemSampler:
    """Takes samples from a thread, at equal intervals."""

    def __init__(self, seconds: float, steps_done: Callable[[], int]) -> None:
        """Begin sampling.

        Args:
            seconds: Time between two samples.
            steps_done: Returns the number of optimizer steps so far.
        """
        self._seconds, self._steps_done = seconds, steps_done
        self._monitors: list[Any] = [make() for make in (CPUMonitor, DiskMonitor, NetworkMonitor)]
        try:
            self._monitors.append(GPUMonitor())  # type: ignore[no-untyped-call]
        except (ImportError, RuntimeError) as error:  # MLflow samples GPUs by nvidia-ml-py, if it is installed
            if any(DEVICES.glob("nvidia[0-9]*")):
                _log.warning("this machine's GPUs are not sampled: %s", error)
        self._samples: deque[Sample] = deque()
        self._ended = threading.Event()
        threading.Thread(target=self._sample, name="system", daemon=True).start()

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        taken: list[Sample] = []
        while self._samples:  # the thread may add a sample during this loop without losing any
            taken.append(self._samples.popleft())
        return taken

    def close(self) -> None:
        """End sampling."""
        self._ended.set()

    def _sample(self) -> None:
        while not self._ended.wait(self._seconds):
            values: dict[str, float] = {}
            for monitor in self._monitors:
                monitor.collect_metrics()
                values |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            self._samples.append((self._steps_done(), now(), values))


def curves_of(samples: list[list[Sample]]) -> dict[str, list[Point]]:
    """Return the curves of all ranks by name, `system/rank-0/cpu_utilization_percentage`.

    Args:
        samples: Samples of each rank, in rank order.
    """
    curves: dict[str, list[Point]] = {}
    for rank, taken in enumerate(samples):
        for step, milliseconds, values in taken:
            for name, value in values.items():
                point = Point(step, float(value), milliseconds)
                curves.setdefault(f"{SYSTEM_GROUP}/rank-{rank}/{name}", []).append(point)
    return curves
