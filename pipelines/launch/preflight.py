"""Everything about the cluster that can be known to fail, said on the driver before the barrier stage starts."""

import socket
import time

from pyspark.sql import SparkSession

_REGISTRATION_SECONDS = 30.0


def check_cluster(spark: SparkSession, num_workers: int, gpus_per_worker: int) -> None:
    """Refuse a run that Spark could not place.

    Raises:
        RuntimeError: Too few slots, dynamic allocation, or no GPUs offered; says which setting to change.
    """
    conf = spark.sparkContext.getConf()
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise RuntimeError(
            "barrier stages cannot run with dynamic allocation: set spark.dynamicAllocation.enabled=false"
        )
    if gpus_per_worker and float(conf.get("spark.task.resource.gpu.amount", "0") or 0) < gpus_per_worker:
        raise RuntimeError(
            f"launch.gpus_per_worker={gpus_per_worker} but Spark gives a task "
            f"{conf.get('spark.task.resource.gpu.amount', '0')} GPUs: set spark.task.resource.gpu.amount and "
            "spark.executor.resource.gpu.amount"
        )
    slots = _slots(spark, num_workers)
    if slots < num_workers:
        raise RuntimeError(
            f"{num_workers} workers do not fit {slots} slots of {spark.sparkContext.master}: lower "
            "launch.num_workers or give Spark more cores"
        )


def _slots(spark: SparkSession, wanted: int) -> int:
    """Tasks that can run at once; waits a while for executors that are still registering."""
    context = spark.sparkContext._jsc.sc()
    deadline = time.monotonic() + (0 if _is_local(spark) else _REGISTRATION_SECONDS)
    while True:
        slots = int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))
        if slots >= wanted or time.monotonic() >= deadline:
            return slots
        time.sleep(0.5)


def driver_addresses(spark: SparkSession) -> tuple[str, str]:
    """Where executors reach the driver, and the address that it listens on: loopback for a local master."""
    if _is_local(spark):
        return "127.0.0.1", "127.0.0.1"
    conf = spark.sparkContext.getConf()
    host = socket.gethostbyname(str(conf.get("spark.driver.host", socket.gethostname())))
    return host, socket.gethostbyname(str(conf.get("spark.driver.bindAddress", host)))


def _is_local(spark: SparkSession) -> bool:
    """Whether the driver is the executor; `local-cluster` has executors of its own."""
    master = str(spark.sparkContext.master)
    return master == "local" or master.startswith("local[")
