"""The kind and the state of a Spark session."""

import socket
from typing import Any

from pyspark.sql import SparkSession

_ANSWER_SECONDS = 5.0


def is_connect(spark: object) -> bool:
    """Return whether a session belongs to Spark Connect."""
    # By name: importing Spark Connect needs gRPC, which a classic session does not.
    return any(kind.__module__.startswith("pyspark.sql.connect.") for kind in type(spark).__mro__)


def is_local_mode(spark: SparkSession) -> bool:
    """Return whether the executor is the driver's own process; Spark then does not retry tasks.

    `local-cluster` has separate executors.
    """
    return not is_connect(spark) and is_local_master(str(spark.sparkContext.master))


def is_local_master(master: str) -> bool:
    """Return whether executors of this master are the driver's own process."""
    return master == "local" or master.startswith("local[")


def check_running(spark: SparkSession) -> None:
    """Refuse a session that has been stopped: by its user, or by Spark when the master of its cluster was lost.

    Raises:
        RuntimeError: It has been stopped.
    """
    connects = is_connect(spark)
    java: Any = None if connects else spark.sparkContext._jsc
    if getattr(spark, "is_stopped", False) if connects else java is None or java.sc().isStopped():
        raise RuntimeError("the Spark session has been stopped: make another one, and start the job again in it")


def is_jvm_gone(spark: SparkSession) -> bool:
    """Return whether the JVM's command port no longer accepts connections; the session is a classic one."""
    parameters = spark.sparkContext._gateway.gateway_parameters  # type: ignore[union-attr]
    try:
        socket.create_connection((parameters.address, parameters.port), _ANSWER_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False
