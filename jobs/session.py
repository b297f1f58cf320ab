"""The Spark session of a job."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files

from pyspark import SparkConf
from pyspark.sql import SparkSession


@contextmanager
def spark_session(name: str, master: str) -> Iterator[SparkSession]:
    """Yield the running session (spark-submit's, a notebook's), or a new one on `master`.

    Only a session that was made here is stopped at the end. A local one listens on loopback only.

    Args:
        name: Shown by Spark.
        master: Used where `spark.master` is not set yet.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    # Executors on this machine use this interpreter, not whatever `python3` is on their path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    chosen = SparkConf().get("spark.master") or master
    with as_file(files("conf") / "log4j2.properties") as logging:
        if SparkConf().get("spark.master") is None:
            builder = builder.master(master)
            builder = builder.config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={logging.as_uri()}")
        if chosen.startswith("local["):
            for key, value in {
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.ui.enabled": "false",
                "spark.ui.showConsoleProgress": "false",
            }.items():
                builder = builder.config(key, value)
        spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()
