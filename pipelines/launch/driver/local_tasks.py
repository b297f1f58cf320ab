"""The tasks of one attempt as threads of the driver: ranks are processes of its machine, without Spark."""

import os
import threading
from pathlib import Path

from pipelines.launch.rank.host import TaskResources
from pipelines.launch.rank.task import RankFailedError, RankResult, TaskInput, run_task

LOOPBACK = "127.0.0.1"
_END_SECONDS = 10.0


class LocalTasks:
    """One thread for each rank."""

    def __init__(self, size: int, task_input: TaskInput) -> None:
        """Start the threads."""
        self._results: list[RankResult] = []
        self._failure: str | None = None
        self._cancelled = threading.Event()
        each = task_input.gpus_per_worker
        cores = max(1, len(os.sched_getaffinity(0)) // size)
        gpus = [str(position) for position in range(len(local_gpus()))]
        by_task = [TaskResources(n, LOOPBACK, cores, gpus[n * each : n * each + each]) for n in range(size)]
        self._threads = [threading.Thread(target=self._run, args=(task_input, resources)) for resources in by_task]
        for thread in self._threads:
            thread.start()

    def failure(self) -> str | None:
        """Return why a task could not run its rank; None if there was no failure."""
        return self._failure

    def stop_reason(self) -> None:
        """Return None: threads of the driver are never decommissioned."""

    def finished(self) -> bool:
        """Return whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def results(self) -> list[RankResult]:
        """Return what the ranks returned."""
        for thread in self._threads:
            thread.join()
        return self._results

    def cancel(self) -> None:
        """End threads that have not connected yet; every other thread ends with its rank."""
        self._cancelled.set()

    def close(self) -> None:
        """Wait until the threads have ended."""
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _run(self, task_input: TaskInput, resources: TaskResources) -> None:
        try:
            result = run_task(task_input, resources, self._cancelled.is_set)
        except RankFailedError:
            return  # the driver already knows the failure
        except Exception as error:
            self._failure = f"task {resources.task}: {type(error).__name__}: {error}"
        else:
            self._results += [] if result is None else [result]


def local_gpus() -> list[str]:
    """Return the GPUs that this process can use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device not in ("", "-1")]
    return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
