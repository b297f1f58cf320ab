"""The Spark session of a job."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files

from pyspark import SparkContext
from pyspark.sql import SparkSession

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
    """
    if SparkContext._active_spark_context is not None:
        yield SparkSession.builder.getOrCreate()
        return
    # Executors on this machine use this interpreter, not whatever `python3` is on their path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    # Under spark-submit the JVM is there before Python and knows the master and all else that was asked for.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    with as_file(files("conf") / "log4j2.properties") as logging:
        if not submitted:
            builder = builder.master(master)
            if master == "local" or master.startswith("local["):
                builder = builder.config(map=dict(_LOOPBACK_ONLY))
                options = f"-Dlog4j2.configurationFile={logging.as_uri()}"
                builder = builder.config("spark.driver.extraJavaOptions", options)
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
