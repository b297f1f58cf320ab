"""What runs inside one barrier task: a process for the rank, and obedience to the driver."""

import json
import os
import platform
import queue
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import wait
from typing import Any

from pipelines.launch.channel import ChannelAddress, Link, Message
from pipelines.launch.placement import visible_devices
from pipelines.launch.process import RankProcess

_LOOK_SECONDS = 0.1
_FLUSH_SECONDS = 30.0
_FAILURE_FLUSH_SECONDS = 3.0
_LAST_WORD_SECONDS = 20.0
_MAXIMUM_TEXT = 1 << 16
_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "horovod", "groundswell")


@dataclass(frozen=True)
class Site:
    """Where a task runs and what it was given there."""

    task: int
    host: str
    cores: int
    gpus: Sequence[str] = ()
    """Spark's addresses."""


@dataclass(frozen=True)
class Launch:
    """What every task of one attempt is given."""

    channel: ChannelAddress
    gpus_per_worker: int
    start_timeout: float
    payload: bytes = field(repr=False)
    """Pickled `(function, args, kwargs)`."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)


def run_task(launch: Launch, site: Site) -> tuple[int, bytes] | None:
    """Run this task's rank to its end: `(rank, pickled result)`, or None where the driver called it off.

    Raises:
        RuntimeError: The worker failed; the driver has been told how, if it could be reached.
    """
    devices, complaint = _devices(launch, site)
    environment = {"CUDA_VISIBLE_DEVICES": devices, **launch.environment}
    process = RankProcess(environment, threads=site.cores)
    try:
        probe = _probe(site.host)
        address = probe.getsockname() if probe is not None else None
        link = Link(launch.channel, _hello(site, address, devices, complaint), process.log)
        try:
            order = _first_order(link, process, launch.start_timeout)
            if order is None or order["kind"] != "go":
                return None
            process.begin(order["environment"], launch.payload)
            return _run(process, link, order["rank"])
        finally:
            process.end()
            link.close()
            if probe is not None:
                probe.close()
    finally:
        process.end()
        process.close()


def _probe(host: str) -> socket.socket | None:
    """A port that is never read: that it takes connections tells the driver that the task and its network are there."""
    try:
        return socket.create_server((host, 0))
    except OSError:  # an address that only others know this host by
        return None


def _devices(launch: Launch, site: Site) -> tuple[str, str]:
    """`CUDA_VISIBLE_DEVICES`, and what is wrong with it: the driver is the one to say so."""
    if not launch.gpus_per_worker:
        return "-1", ""
    if len(site.gpus) < launch.gpus_per_worker:
        return "-1", f"Spark gave a task {len(site.gpus)} GPUs: set spark.task.resource.gpu.amount"
    try:
        addresses = site.gpus[: launch.gpus_per_worker]
        return visible_devices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES")), ""
    except RuntimeError as error:
        return "-1", str(error)


def _hello(site: Site, probe: tuple[str, int] | None, devices: str, complaint: str) -> Message:
    name = socket.gethostname()
    return {
        "kind": "hello",
        "task": site.task,
        "host": site.host,
        "probe": probe,
        "devices": devices,
        "complaint": complaint,
        "hostname": name,
        "resolves_to": _resolved(name),
        "versions": _versions(),
    }


def _resolved(name: str) -> str:
    """What Gloo will bind to: the address of the host's own name, or why that cannot be."""
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


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def _first_order(link: Link, process: RankProcess, seconds: float) -> Message | None:
    """The driver's word once all tasks are there; None where none comes."""
    try:
        return link.orders.get(timeout=seconds)
    except queue.Empty:
        return None


def _run(process: RankProcess, link: Link, rank: int) -> tuple[int, bytes] | None:
    """Pass messages on until the process has ended or the driver wants it to, then tell how."""
    result: bytes | None = None
    failure: dict[str, str] | None = None
    stopped = False
    while not stopped:
        ready = wait([process.reader], _LOOK_SECONDS)
        # A child that the worker left behind may hold the pipe open: the process's own end counts too.
        running = process.running()
        try:
            while process.reader.poll():
                frame = process.reader.recv_bytes()
                if frame[:1] == b"R":
                    result = frame[1:]
                    continue
                message: Message = json.loads(frame[1:])
                if message["kind"] == "failure":
                    failure = {name: text[-_MAXIMUM_TEXT:] for name, text in message.items()}
                else:
                    link.send(message)
        except (EOFError, OSError):
            if running and ready:
                time.sleep(_LOOK_SECONDS / 10)  # the pipe ends a moment before the process
        if not running:
            break
        stopped = _obey(process, link)
    process.end()
    faults, last_lines = process.faults(), process.log.last_lines()
    if faults and not stopped:
        process.log.write(f"\n{faults}\n")
    good = result is not None and process.process.returncode == 0
    link.flush(_FLUSH_SECONDS if good else _FAILURE_FLUSH_SECONDS)
    link.send(
        {
            "kind": "exit",
            "stopped": stopped,
            "finished": result is not None,
            "exit_code": process.process.returncode,
            "death": process.death(),
            "faults": faults,
            "failure": failure,
            "last_lines": last_lines,
        }
    )
    link.flush(_FAILURE_FLUSH_SECONDS)
    if good and not stopped:
        assert result is not None
        return rank, result
    if stopped:
        return None
    # The first task that fails ends the stage, and Spark then kills the others where they stand: they speak first.
    _wait_for_stop(link)
    said = failure["traceback"] if failure else "\n".join(last_lines)
    raise RuntimeError(f"rank {rank} failed: {process.death()}\n{said}")


def _obey(process: RankProcess, link: Link) -> bool:
    """Whether the driver wants the process to end."""
    while not link.orders.empty():
        match link.orders.get()["kind"]:
            case "stop":
                return True
            case "stacks":
                link.send({"kind": "stacks", "text": process.stacks()})
    return False


def _wait_for_stop(link: Link) -> None:
    deadline = time.monotonic() + _LAST_WORD_SECONDS
    while link.connected and time.monotonic() < deadline:
        try:
            order: dict[str, Any] = link.orders.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            continue
        if order["kind"] == "stop":
            return
