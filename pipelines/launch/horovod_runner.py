"""The API of Databricks' HorovodRunner (last runtime 15.4) on this package's launcher, so that old notebooks run.

hr = HorovodRunner(np=2, driver_log_verbosity="all")
hr.run(train, learning_rate=0.1)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pyspark.sql import SparkSession

from pipelines.launch.driver.local_tasks import local_gpus
from pipelines.launch.driver.preflight import check_session, gpus_per_task, settled_slots
from pipelines.launch.driver.rank_output import LogToDriver
from pipelines.launch.rank.report import log_to_driver
from pipelines.launch.runner import BarrierRunner

if TYPE_CHECKING:
    from pipelines.launch.log_callback import LogCallback

__all__ = ["HorovodRunner", "LogCallback", "log_to_driver"]

_VERBOSITY: dict[str, LogToDriver] = {"all": "all", "log_callback_only": "callback"}


class HorovodRunner:
    """Runs a function as a Horovod job."""

    def __init__(
        self,
        *,
        np: int,
        driver_log_verbosity: Literal["log_callback_only", "all"] = "log_callback_only",
    ) -> None:
        """Describe the job.

        Args:
            np: Number of ranks, one per Spark task, with the GPUs of a task. A negative number starts that number of
                processes on the driver's machine, and shows their whole output. Zero starts one rank for every slot.
            driver_log_verbosity: Whether to show the whole output of the ranks, or only lines from `log_to_driver` and
                `LogCallback`.

        Raises:
            ValueError: `driver_log_verbosity` is unknown.
        """
        if driver_log_verbosity not in _VERBOSITY:
            raise ValueError(f"driver_log_verbosity={driver_log_verbosity!r} is not one of {', '.join(_VERBOSITY)}")
        self.num_processor = np
        self._log_to_driver = _VERBOSITY[driver_log_verbosity]

    def run(self, /, *main: Callable[..., Any], **kwargs: Any) -> Any:
        """Run `main(**kwargs)` on every rank; return rank 0's value.

        Args:
            main: The function. It may also be given by name, as `main`.
            kwargs: Arguments of the function.

        Raises:
            TypeError: There is no function, or there are several.
            ValueError: The function or an argument cannot be pickled, or the session is one of Spark Connect.
            RuntimeError: The cluster cannot place the ranks, or several Spark tasks share a GPU.
            WorkerError: The function raised an exception in a rank.
            InfrastructureError: A rank died, hung, was lost or did not start.
        """
        function = main or (kwargs.pop("main", None),)
        if len(function) != 1 or not callable(function[0]):
            raise TypeError("run() takes one function, main, and its arguments by name")
        return self._runner().run(function[0], **kwargs)

    def _runner(self) -> BarrierRunner:
        if self.num_processor < 0:
            size = -self.num_processor
            return BarrierRunner(
                None,
                size,
                gpus_per_worker=1 if len(local_gpus()) >= size else 0,
                picks_gpu=True,
                log_to_driver="all",
            )
        spark = SparkSession.builder.getOrCreate()
        check_session(spark)
        size = self.num_processor or settled_slots(spark)
        return BarrierRunner(
            spark, size, gpus_per_worker=gpus_per_task(spark), picks_gpu=True, log_to_driver=self._log_to_driver
        )


def __getattr__(name: str) -> Any:
    # Importing Keras takes ten seconds, which a driver without training should not spend.
    if name == "LogCallback":
        from pipelines.launch.log_callback import LogCallback

        return LogCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
