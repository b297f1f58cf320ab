"""The Spark session of a job."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import as_file, files

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from jobs.command import is_submitted, say

_LOOPBACK_ONLY = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@contextmanager
def spark_session(name: str, master: str) -> Iterator[SparkSession]:
    """Yield the running session (a notebook's), spark-submit's, or a new one on `master`.

    Only a session that was made here is stopped at the end. A local one listens on loopback only.

    Args:
        name: Shown by Spark.
        master: Used where neither a running session nor spark-submit has chosen one.

    Raises:
        RuntimeError: Spark does not start, or the process uses Spark Connect.
    """
    if is_remote() or "SPARK_REMOTE" in os.environ:
        raise RuntimeError(
            "this process uses Spark Connect, which cannot run barrier stages: unset SPARK_REMOTE and "
            "SPARK_CONNECT_MODE_ENABLED, and use a classic session (on Databricks, a cluster with dedicated access)"
        )
    if SparkContext._active_spark_context is not None:
        yield SparkSession.builder.getOrCreate()
        return
    # Executors on this machine use this interpreter, not whatever `python3` is on their path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    submitted = is_submitted()
    with as_file(files("conf") / "log4j2.properties") as logging:
        if not submitted:
            builder = builder.master(master)
            if master == "local" or master.startswith("local["):
                builder = builder.config(map=dict(_LOOPBACK_ONLY))
                options = f"-Dlog4j2.configurationFile={logging.as_uri()}"
                builder = builder.config("spark.driver.extraJavaOptions", options)
        say(f"starting Spark ({'as submitted' if submitted else master})")
        spark = _start(builder)
    try:
        yield spark
    finally:
        with suppress(Py4JError, OSError):  # its JVM may have died, which is told by whoever needed it
            spark.stop()


def _start(builder: SparkSession.Builder) -> SparkSession:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"Spark does not start: {reason} Java 17 is needed: is JAVA_HOME right?") from None
    finally:
        # Spark's own handler would talk to the JVM in the middle of another call.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)
