"""The Spark session of a job."""

import os
import shutil
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.resources import as_file, files
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from jobs.shell.command import is_submitted, say
from pipelines.launch.driver.preflight import check_local_gpus
from pipelines.machine.notebook import quieten_spark
from pipelines.spark.session import check_running, is_local_master
from pipelines.storage.locations import redacted

_ANSWER_SECONDS = 2.0
_REMEDIES = {
    "cpus per task": " See spark.executor.cores and spark.task.cpus.",
    "getSubject": " This Java is too new for Spark: set JAVA_HOME to Java 17 or 21.",
}
"""Remedies by a part of Spark's reason."""
_LOOPBACK_ONLY = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


@contextmanager
def spark_session(
    name: str, master: str, *, runs_on_connect: bool = False, gpus_per_worker: int = 0
) -> Iterator[SparkSession]:
    """Yield the running session (a notebook's), spark-submit's, or a new one on `master`.

    Only a session that this function creates is stopped at the end. A local session listens only on loopback.

    Args:
        name: Name of the application in Spark's page.
        master: Master that is used if neither a running session nor spark-submit has chosen one.
        runs_on_connect: Whether Spark Connect is enough, because the job has no barrier stage.
        gpus_per_worker: GPUs that each rank needs.

    Raises:
        ValueError: There is no Java, or ranks in a new local session need GPUs.
        RuntimeError: Spark does not start or has been stopped, or the job cannot run on this process's Spark Connect.
    """
    if is_remote() or "SPARK_REMOTE" in os.environ:
        if not runs_on_connect:
            raise RuntimeError(
                "this process uses Spark Connect, which cannot run barrier stages (prepare, evaluate and score run "
                "there): unset SPARK_REMOTE and SPARK_CONNECT_MODE_ENABLED, and use a classic session (on Databricks, "
                "a cluster with dedicated access)"
            )
        running = SparkSession.getActiveSession()
        spark = _connected() if running is None else running
    elif SparkContext._active_spark_context is not None:
        running = spark = SparkSession.builder.getOrCreate()
        check_running(spark)
        quieten_spark(spark)
    else:
        if not is_submitted():
            check_local_gpus(master, gpus_per_worker)
        running, spark = None, _started(name, master)
    try:
        yield spark
    finally:
        if running is None:
            with suppress(Exception):  # its JVM or its server may have died; whoever needed it reports that
                spark.stop()


def _connected() -> SparkSession:
    try:
        return SparkSession.builder.getOrCreate()
    except (PySparkException, ImportError) as error:
        address = redacted(os.environ.get("SPARK_REMOTE", ""))
        raise RuntimeError(f"Spark Connect at {address!r} cannot be used: {str(error).splitlines()[0]}") from None


def _started(name: str, master: str) -> SparkSession:
    # Executors on this machine use this interpreter, not the `python3` on their path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    submitted = is_submitted()
    with as_file(files("conf") / "log4j2.properties") as logging:
        if submitted:
            settings = _own_settings(name)
        else:
            _check_java()
            _check_master(master)
            # Spark's bar of stages would write over the job's own lines and bars.
            settings = {"spark.app.name": name, "spark.master": master, "spark.ui.showConsoleProgress": "false"}
            if is_local_master(master):
                settings |= {
                    **_LOOPBACK_ONLY,
                    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging.as_uri()}",
                }
        say(f"starting Spark ({'as submitted' if submitted else master})")
        return _start(settings)


def _own_settings(name: str) -> dict[str, str]:
    """Return settings that nobody chose: the name, and the log level of Spark's shells, warnings.

    The start alone logs 170 lines. Without `--name` spark-submit takes the name of the script.
    """
    SparkContext._ensure_initialized()  # spark-submit's JVM knows its settings
    conf = SparkConf()
    settings = {"spark.app.name": name} if conf.get("spark.app.name") in (None, Path(sys.argv[0]).name) else {}
    is_in_options = "log4j" in conf.get("spark.driver.extraJavaOptions", "")
    if is_in_options or conf.contains("spark.log.level") or _has_file("log4j2.properties"):
        return settings
    return settings | {"spark.log.level": "WARN"}


def _has_file(name: str) -> bool:
    """Return whether the folder of Spark's settings has a file."""
    folders = [os.environ.get("SPARK_CONF_DIR"), Path(os.environ.get("SPARK_HOME", ""), "conf")]
    return any(Path(folder, name).is_file() for folder in folders if folder)


def _check_java() -> None:
    """Refuse to start Spark's script without Java: it would print lines of its own."""
    home = os.environ.get("JAVA_HOME")
    if shutil.which(f"{home}/bin/java" if home else "java") is None and not _has_file("spark-env.sh"):
        found = f"JAVA_HOME={home} has no bin/java" if home else "there is no Java"
        raise ValueError(f"Spark does not start: {found}: set JAVA_HOME to Java 17 or 21")


def _check_master(master: str) -> None:
    """Refuse a standalone master that does not answer as one: Spark would try for a minute, and print stack traces."""
    places = [each.rpartition(":") for each in master.removeprefix("spark://").split(",")]
    is_valid = master.startswith("spark://") and all(port.isdecimal() for _, _, port in places)
    if is_valid and not any(_is_spark(host.strip("[]"), int(port)) for host, _, port in places):
        raise RuntimeError(f"no Spark master answers at {master}: is it running, and the address right?")


def _is_spark(host: str, port: int) -> bool:
    """Return whether a port takes connections, and answers a request for a file in frames of Spark's RPC.

    Source: StreamRequest of Spark's network-common: the frame's length (8 bytes), type 6, a text with its length. A
    server that is silent, hangs up, or answers by TLS (its records begin with 21) may be one of Spark.
    """
    name = b"/files/\r\n\r\n"  # ends a request of HTTP too
    try:
        with socket.create_connection((host, port), _ANSWER_SECONDS) as connection, suppress(OSError):
            connection.sendall(struct.pack(">qbi", 13 + len(name), 6, len(name)) + name)
            return connection.recv(1024)[:1] in (b"", b"\0", b"\x15")
    except OSError:
        return False
    return True


def _start(settings: dict[str, str]) -> SparkSession:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        if SparkContext._gateway is None:
            # A signal to this process's group does not reach a JVM in a session of its own. It ends with its input.
            conf = SparkConf().setAll([*settings.items()])
            gateway = launch_gateway(conf, {"start_new_session": True})  # type: ignore[no-untyped-call]
            SparkContext._ensure_initialized(gateway=gateway)
        return SparkSession.builder.config(map={**settings}).getOrCreate()
    except PySparkRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"Spark does not start: {reason} Java 17 or 21 is needed: is JAVA_HOME right?") from None
    except (Py4JJavaError, PySparkException) as error:
        java = getattr(error, "java_exception", None)
        reason = str(error if java is None else java.getMessage()).splitlines()[0]
        remedy = next((text for part, text in _REMEDIES.items() if part in reason), "")
        raise RuntimeError(f"Spark does not start: {reason}{remedy}") from None
    finally:
        # Spark's own handler would call the JVM during another call.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)
