"""Keeps Spark's own messages out of the cells of a notebook."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOGS_OF_TASKS = (
    "org.apache.spark.api.python.PythonRunner",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules


def quieten_spark(spark: "SparkSession") -> None:
    """Turn off a session's progress bar and its log of failed tasks, whose Python traceback our own error contains.

    This has an effect only in a notebook, and lasts as long as the session. The reason: log lines come after a job
    has failed, and a stopped bar cannot start again.

    Args:
        spark: Classic session.
    """
    if not in_notebook():
        return
    from py4j.protocol import Py4JError  # the command line works without Spark's packages until it needs them

    with suppress(Py4JError, OSError):  # the JVM may have died; the next call that needs it reports this
        log4j: Any = spark.sparkContext._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
        for name in _LOGS_OF_TASKS:
            log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
        bar = spark.sparkContext._jsc.sc().progressBar()
        if bar.isDefined():
            bar.get().stop()
