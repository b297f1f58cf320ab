"""What keeps Spark's own words out of the cells of a notebook."""

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
    """Whether this process is a notebook's kernel."""
    return "ipykernel" in sys.modules


def quieten_spark(spark: "SparkSession") -> None:
    """Turn off a session's bar of stages and its log of failed tasks, whose Python traceback our one error has too.

    This does something in a notebook only, and lasts as long as the session: lines come after a job has failed, and a
    bar that was stopped cannot start again.

    Args:
        spark: A classic session.
    """
    if not in_notebook():
        return
    from py4j.protocol import Py4JError  # the command line does without Spark's packages until it needs them

    with suppress(Py4JError, OSError):  # its JVM may have died, which is told by whoever needs it
        jvm: Any = spark.sparkContext._jvm
        log4j = jvm.org.apache.logging.log4j
        for name in _LOGS_OF_TASKS:
            log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
        bar = spark.sparkContext._jsc.sc().progressBar()
        if bar.isDefined():
            bar.get().stop()
