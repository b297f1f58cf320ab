"""The host of a task: its resources, what the driver must know of it, and a port that shows that it works."""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.launch.driver.placement import visible_devices
from pipelines.launch.rank import cuda
from pipelines.launch.wire.messages import Hello
from pipelines.launch.wire.transport import accept_connections, stop_listening
from pipelines.machine.versions import versions


@dataclass(frozen=True)
class TaskResources:
    """The location of a task and its resources there."""

    task: int
    host: str
    cores: int
    gpus: Sequence[str] = ()
    """Addresses of GPUs, from Spark."""


@contextmanager
def probe_port(host: str) -> Iterator[int | None]:
    """Open a port inside this block whose connections show the driver that the task and its network work.

    The port is None if only other hosts use this address for this host. Nothing is read from its connections.
    """
    try:
        listener = socket.create_server((host, 0))
    except OSError:
        yield None
        return
    # They are accepted and end: the kernel queues only 128 that are not accepted.
    accept_connections(listener, lambda connection, address: connection.close(), "groundswell-probe")
    try:
        yield listener.getsockname()[1]
    finally:
        stop_listening(listener)


def visible_gpus(resources: TaskResources, gpus_per_worker: int) -> tuple[str, str]:
    """Return `CUDA_VISIBLE_DEVICES`, and the problem with it, which the driver reports; empty if there is none."""
    if not gpus_per_worker:
        return "-1", ""
    if len(resources.gpus) < gpus_per_worker:
        return "-1", f"Spark gave a task {len(resources.gpus)} GPUs: set spark.task.resource.gpu.amount"
    try:
        devices = visible_devices(resources.gpus[:gpus_per_worker], os.environ.get("CUDA_VISIBLE_DEVICES"))
        return devices, cuda.complaint()
    except RuntimeError as error:
        return "-1", str(error)


def hello_of(resources: TaskResources, port: int | None, devices: str, complaint: str) -> Hello:
    """Return a task's first message.

    Args:
        resources: Location of the task.
        port: The port of `probe_port`.
        devices: The first value of `visible_gpus`.
        complaint: The second value of `visible_gpus`.
    """
    name = socket.gethostname()
    return Hello(
        resources.task,
        resources.host,
        port,
        devices,
        complaint,
        hostname=name,
        resolves_to=_resolved(name),
        shared_memory_mib=shutil.disk_usage("/dev/shm").total >> 20 if Path("/dev/shm").is_dir() else 0,
        versions=versions(),
    )


def _resolved(name: str) -> str:
    """Return the address of the host's own name, to which Gloo will bind, or why there is none."""
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return f"nothing ({error})"
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return f"{address}, which is no address of that host"
    return address
