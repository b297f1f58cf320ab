"""Checks of the cluster on the driver, before any function starts."""

import logging
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from pyspark import SparkConf
from pyspark.sql import SparkSession

from pipelines.launch.wire.messages import Hello
from pipelines.machine.console import counted
from pipelines.machine.versions import OWN, check_code
from pipelines.spark.session import check_running, is_connect, is_local_master, is_local_mode

REGISTRATION_SECONDS = 30.0
"""Seconds that executors may take to register."""
LOOK_SECONDS = 0.2
"""Seconds between two polls of Spark's slots."""
SETTLED_SECONDS = 3.0
"""Executors that start together register within this number of seconds of each other."""
_ANSWER_SECONDS = 2.0
# What each setting protects: https://spark.apache.org/docs/latest/security.html
_PROTECTION = {
    "spark.ssl.enabled": "Spark's web pages",
    "spark.ssl.rpc.enabled": "functions and results, which Spark carries",
    "spark.authenticate": "who may join Spark's own traffic, functions and results among it",
    "spark.network.crypto.enabled": "functions and results, which Spark carries",
}
_TASK_GPUS = "spark.task.resource.gpu.amount"
_EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
_NCCL_SHARED_MEMORY_MIB = 64
_log = logging.getLogger(__name__)


def check_session(spark: object) -> None:
    """Refuse a session of Spark Connect: its client has no SparkContext, so no barrier stages and no slots.

    Raises:
        ValueError: The session is one of Spark Connect; the text says what to pass instead.
    """
    if is_connect(spark):
        raise ValueError(
            "the session is one of Spark Connect, which cannot run barrier stages: pass a classic session (unset "
            "SPARK_REMOTE, and use SparkSession.builder.master(...) or spark-submit; on Databricks, a cluster with "
            "dedicated access), or spark=None for processes of this machine (HorovodRunner: np=-2)"
        )


def check_cluster(spark: SparkSession, num_workers: int, gpus_per_worker: int) -> None:
    """Refuse a run that does not fit the cluster.

    Raises:
        ValueError: See `check_local_gpus`.
        RuntimeError: Too few slots, dynamic allocation, or no GPUs; the text says which setting to change.
    """
    conf = spark.sparkContext.getConf()
    if _is_true(conf, "spark.dynamicAllocation.enabled"):
        raise RuntimeError(
            "barrier stages cannot run with dynamic allocation: set spark.dynamicAllocation.enabled=false"
        )
    check_local_gpus(str(spark.sparkContext.master), gpus_per_worker)
    if gpus_per_worker and (given := gpus_per_task(spark)) < gpus_per_worker:
        raise RuntimeError(
            f"gpus_per_worker={gpus_per_worker}, but Spark gives a task {counted(given, 'GPU')}: set {_TASK_GPUS} and "
            f"{_EXECUTOR_GPUS}"
        )
    slots = count_slots(spark, num_workers)
    if slots < num_workers:
        raise RuntimeError(
            f"{counted(num_workers, 'worker')} do not fit {counted(slots, 'slot')} of {spark.sparkContext.master}: "
            f"lower num_workers or give Spark more cores{_unused_cores(conf)}"
        )


def check_local_gpus(master: str, gpus_per_worker: int) -> None:
    """Refuse GPUs for ranks in a local session, whose tasks can have none.

    Raises:
        ValueError: The ranks need GPUs; the text says how tasks on one machine get them.
    """
    if gpus_per_worker and is_local_master(master):
        raise ValueError(
            f"gpus_per_worker={gpus_per_worker}, but a local session ({master}) has no GPUs for its tasks: use those "
            "of this machine by spark-submit --master 'local-cluster[1,1,4096]' --conf for each of "
            f"spark.worker.resource.gpu.amount=1, {_EXECUTOR_GPUS}=1, {_TASK_GPUS}=1 and "
            "spark.worker.resource.gpu.discoveryScript=docker/spark/discover-gpus.sh"
        )


def gpus_per_task(spark: SparkSession) -> int:
    """Return the number of GPUs that Spark gives a task.

    Raises:
        RuntimeError: Several tasks share a GPU, but ranks cannot.
    """
    amount = float(spark.sparkContext.getConf().get(_TASK_GPUS, "0") or 0)
    if 0 < amount < 1:
        raise RuntimeError(
            f"{_TASK_GPUS}={amount:g} gives one GPU to {round(1 / amount)} tasks, and NCCL does not let two ranks "
            f"share a GPU: set {_TASK_GPUS}=1"
        )
    return int(amount)


def unused_gpus(spark: SparkSession, gpus_per_worker: int) -> str:
    """Return a note if Spark has GPUs that the workers will not see; otherwise an empty text."""
    for owner, setting in (("task", _TASK_GPUS), ("executor", _EXECUTOR_GPUS)):
        amount = float(spark.sparkContext.getConf().get(setting, "0") or 0)
        if amount and not gpus_per_worker:
            return (
                f"the workers train on CPUs, as gpus_per_worker=0, though {setting}={amount:g} reserves GPUs for each "
                f"{owner}: gpus_per_worker=1 uses them"
            )
    return ""


def _unused_cores(conf: SparkConf) -> str:
    """Return which settings divide an executor's cores into slots, and how many cores stay unused; empty if unknown."""
    executor, task = conf.get("spark.executor.cores"), int(conf.get("spark.task.cpus", "1"))
    if executor is None:
        return f" (spark.task.cpus={task} cores make one slot)" if task > 1 else ""
    unused = int(executor) % task
    return (
        f" (spark.executor.cores={executor} and spark.task.cpus={task} make "
        f"{counted(int(executor) // task, 'slot')} an executor"
        + (f" and leave {counted(unused, 'core')} unused)" if unused else ")")
    )


def count_slots(spark: SparkSession, wanted: int | None = None, seconds: float | None = None) -> int:
    """Return how many tasks can run at once; wait for executors that are still registering.

    Args:
        spark: A session.
        wanted: Number of tasks at which this returns at once; None: do not wait.
        seconds: Seconds to wait for `wanted`; None: as long as executors take to register.

    Raises:
        RuntimeError: The session has been stopped.
    """
    check_running(spark)
    context = spark.sparkContext._jsc.sc()
    limit = REGISTRATION_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + (0 if wanted is None or is_local_mode(spark) else limit)
    while True:
        slots = int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))
        if (wanted is not None and slots >= wanted) or time.monotonic() >= deadline:
            return slots
        time.sleep(LOOK_SECONDS)


def settled_slots(spark: SparkSession) -> int:
    """Return how many tasks can run at once, after new executors have had time to register.

    Raises:
        RuntimeError: No executor has registered.
    """
    deadline = time.monotonic() + (0 if is_local_mode(spark) else REGISTRATION_SECONDS)
    slots, since = count_slots(spark), time.monotonic()
    started = spark.sparkContext.startTime or 0  # milliseconds since 1970
    while time.monotonic() < deadline:
        is_old = time.time() - started / 1000 > REGISTRATION_SECONDS
        if slots and (is_old or time.monotonic() - since > SETTLED_SECONDS):
            return slots
        time.sleep(LOOK_SECONDS)
        if slots != (slots := count_slots(spark)):
            since = time.monotonic()
    if not slots:
        raise RuntimeError(
            f"no executor of {spark.sparkContext.master} has a free slot for a worker after {REGISTRATION_SECONDS:g} s"
        )
    return slots


def drop_lost_executors(spark: SparkSession, unreachable_hosts: Collection[str] = ()) -> None:
    """Make Spark replace executors that do not answer: otherwise it offers their slots for minutes.

    Args:
        spark: Session of the executors.
        unreachable_hosts: Hosts that the driver cannot connect to: a missing answer says nothing about their state.

    Raises:
        RuntimeError: The session has been stopped.
    """
    if is_local_mode(spark):
        return
    check_running(spark)
    for executor in _executors(spark):
        host, _, port = executor.hostPort().rpartition(":")
        # An executor that Spark has just started has no port yet.
        if host and host not in unreachable_hosts and not answers(host, port):
            _log.warning("executor %s at %s does not answer: it is dropped", executor.id(), executor.hostPort())
            # `killExecutor` would lower the number of executors that Spark requests for the rest of the session.
            spark.sparkContext._jsc.sc().killAndReplaceExecutor(executor.id())


def decommissioned_executor(spark: SparkSession) -> str | None:
    """Return which executor with running tasks Spark will decommission; None if there is none."""
    scheduler = spark.sparkContext._jsc.sc().taskScheduler()
    for executor in _executors(spark):
        if executor.activeTasks() and scheduler.getExecutorDecommissionState(executor.id()).isDefined():
            return f"Spark decommissions executor {executor.id()} at {executor.hostPort()}"
    return None


def _executors(spark: SparkSession) -> list[Any]:
    """Return the active executors of Spark's status store, without the driver."""
    listed = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    executors = [listed.apply(number) for number in range(listed.size())]
    return [executor for executor in executors if executor.id() != "driver"]


def check_encryption(spark: SparkSession, accepted: bool) -> None:
    """Refuse to send unencrypted gradients in a cluster with encryption switched on, unless the user accepts it.

    Raises:
        RuntimeError: The user does not accept it. The text says what Spark encrypts, what it does not encrypt, and
            which setting accepts that.
    """
    conf = spark.sparkContext.getConf()
    asked = [f"{name}=true covers {what}" for name, what in _PROTECTION.items() if _is_true(conf, name)]
    if asked and not accepted:
        raise RuntimeError(
            f"{'; '.join(asked)}; the ranks' own traffic is not covered: gradients and Horovod's rendezvous go in the "
            "clear between the hosts of this job; logs, reports and large return values go in the clear to the driver, "
            "which proves a secret of the run. Accept that with accept_unencrypted=True, or run on an encrypted network"
        )


def _is_true(conf: SparkConf, name: str) -> bool:
    """Return whether a setting is true, as Spark reads it."""
    return str(conf.get(name, "false")).strip().lower() == "true"


def check_tasks(hellos: Sequence[Hello], own_version: str) -> None:
    """Refuse ranks that would fail together, judged by each task's information about its host.

    Args:
        hellos: First messages of the tasks.
        own_version: Version and code of this project that the driver has imported.

    Raises:
        RuntimeError: GPUs are missing or assigned twice, versions or code differ, or a host name resolves to loopback.
    """
    for hello in hellos:
        if hello.complaint:
            raise RuntimeError(f"host {hello.host}: {hello.complaint}")
    _check_versions(hellos)
    check_code(own_version, hellos[0].versions[OWN], hellos[0].host)
    _check_names(hellos)
    _check_gpus(hellos)
    _warn_of_little_shared_memory(hellos)


def _check_versions(hellos: Sequence[Hello]) -> None:
    for package in hellos[0].versions:
        hosts: dict[str, list[str]] = defaultdict(list)
        for hello in hellos:
            hosts[hello.versions.get(package, "none")].append(hello.host)
        if len(hosts) > 1:
            found = ", ".join(f"{version} on {names[0]}" for version, names in hosts.items())
            raise RuntimeError(
                f"ranks have different versions of {package}: {found}; give all executors one environment "
                "(spark.pyspark.python, or the same image)"
            )


def _check_names(hellos: Sequence[Hello]) -> None:
    if len({hello.host for hello in hellos}) == 1:
        return
    for hello in hellos:
        name, address = hello.hostname, hello.resolves_to
        if address.startswith("127.") or not address.replace(".", "").isdecimal():
            raise RuntimeError(
                f"host {hello.host} resolves its own name {name!r} to {address}, where other hosts cannot reach "
                f"Gloo: map {name!r} to {hello.host} in its /etc/hosts"
            )


def _check_gpus(hellos: Sequence[Hello]) -> None:
    tasks = Counter((hello.host, device) for hello in hellos for device in hello.devices.split(","))
    for (host, device), count in tasks.items():
        if count > 1 and device not in ("", "-1"):
            raise RuntimeError(
                f"GPU {device} of host {host} was given to two tasks: look at the discovery script "
                "(spark.worker.resource.gpu.discoveryScript), and give each worker of a host GPUs of its own"
            )


def _warn_of_little_shared_memory(hellos: Sequence[Hello]) -> None:
    """Warn of NCCL's "No space left on device" on hosts whose GPUs do not reach each other directly."""
    users = Counter(hello.host for hello in hellos if hello.devices not in ("", "-1"))
    for hello in hellos:
        # The limit is the default size of /dev/shm in a container.
        if users.pop(hello.host, 0) > 1 and hello.shared_memory_mib <= _NCCL_SHARED_MEMORY_MIB:
            _log.warning(
                "host %s has %d MiB in /dev/shm, through which NCCL connects GPUs that cannot reach each other "
                "directly: give the container 1 GiB (docker run --shm-size 1g, or an emptyDir with medium Memory)",
                hello.host,
                hello.shared_memory_mib,
            )


def answers(host: str, port: int | str) -> bool:
    """Return whether a port accepts connections."""
    try:
        socket.create_connection((host, int(port)), _ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def driver_addresses(spark: SparkSession) -> tuple[str, str]:
    """Return the driver's address for executors, and the address to listen on; both are loopback for a local master."""
    if is_local_mode(spark):
        return "127.0.0.1", "127.0.0.1"
    conf = spark.sparkContext.getConf()
    host = socket.gethostbyname(str(conf.get("spark.driver.host", socket.gethostname())))
    return host, socket.gethostbyname(str(conf.get("spark.driver.bindAddress", host)))
