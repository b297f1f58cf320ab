"""What runs inside one barrier task: agree on placement, start the worker process, pass on what it says."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from pyspark import BarrierTaskContext

from pipelines.launch.channel import ChannelAddress, Sender
from pipelines.launch.placement import Placement, check_reachable, place, visible_devices
from pipelines.launch.worker import LENGTH_BYTES

_LAST_LINES = 50
_LOOK_SECONDS = 0.5
_LINE_END = re.compile(rb"\r?\n|\r")
_MAXIMUM_LINE_BYTES = 1 << 14
_MAXIMUM_TEXT = 1 << 16
_CONSEQUENCE_GRACE_SECONDS = 5.0
_TERMINATION_SECONDS = 5.0

# TensorFlow on a CPU pays for the first touch of every page of a large temporary: glibc must keep its memory.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@dataclass(frozen=True)
class Launch:
    """What every task of one run is given."""

    payload: bytes
    """Pickled `(function, args, kwargs)`."""
    channel: ChannelAddress
    gpus_per_worker: int
    start_timeout_seconds: int
    environment: dict[str, str] = field(default_factory=dict)


def run_task(launch: Launch) -> Iterator[tuple[int, bytes]]:
    """Run this task's rank to its end and yield `(rank, pickled result)`.

    Raises:
        RuntimeError: The worker failed; the driver has been told how.
    """
    context = BarrierTaskContext.get()
    hosts = [info.address.rsplit(":", 1)[0] for info in context.getTaskInfos()]
    placement = place(hosts)[context.partitionId()]
    sender = Sender(launch.channel)
    try:
        with _rendezvous(context, placement, hosts) as (address, port):
            environment = _environment(launch, context, placement)
            environment |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
            check_reachable(environment)
            yield placement.rank, _run_worker(launch, placement, environment, sender)
            # The server must outlive every rank's start.
            context.barrier()
    finally:
        sender.close()


@contextmanager
def _rendezvous(context: BarrierTaskContext, placement: Placement, hosts: list[str]) -> Iterator[tuple[str, int]]:
    """Horovod's rendezvous server, in rank 0's task, for the addresses of this job only."""
    if placement.rank != 0:
        yield _agreed(context, "")
        return
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    allowed = {address for host in hosts for address in _addresses(host)} | {_address(placement.host)}

    class Server(RendezvousHTTPServer):  # type: ignore[misc]
        def verify_request(self, request: socket.socket, client_address: tuple[str, int]) -> bool:
            return client_address[0] in allowed

    server = Server((_address(placement.host), 0), RendezvousHandler, False)
    sizes: dict[str, int] = {}
    for host in hosts:
        sizes[host] = sizes.get(host, 0) + 1
    plan = ",".join(f"{host}:{count}" for host, count in sizes.items())
    server.init(get_host_assignments(parse_hosts(plan), len(hosts)))
    threading.Thread(target=server.serve_forever, name="groundswell-rendezvous", daemon=True).start()
    try:
        host, port = server.server_address[:2]
        yield _agreed(context, f"{host}:{port}")
    finally:
        server.shutdown()
        server.server_close()


def _agreed(context: BarrierTaskContext, address: str) -> tuple[str, int]:
    told = next(filter(None, context.allGather(address)))
    host, port = told.rsplit(":", 1)
    return host, int(port)


def _address(host: str) -> str:
    return socket.gethostbyname(host)


def _addresses(host: str) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET)]


def _environment(launch: Launch, context: BarrierTaskContext, placement: Placement) -> dict[str, str]:
    threads = str(context.cpus())
    environment = {
        **os.environ,
        **_ALLOCATOR,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        **dict.fromkeys(THREAD_VARIABLES, threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(launch.start_timeout_seconds),
        **placement.environment(),
        **launch.environment,
    }
    if launch.gpus_per_worker:
        addresses = context.resources()["gpu"].addresses[: launch.gpus_per_worker]
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))
    else:
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    return environment


def _run_worker(launch: Launch, placement: Placement, environment: dict[str, str], sender: Sender) -> bytes:
    reader, writer = Pipe(duplex=False)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines.launch.worker", str(writer.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=[writer.fileno()],
        start_new_session=True,
    )
    writer.close()
    try:
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        log = threading.Thread(target=_forward_log, args=(process, placement.rank, sender, lines), daemon=True)
        log.start()
        _give(process, launch.payload)
        result, failure = _listen(process, reader, placement.rank, sender)
        exit_code = process.wait()
        log.join(_TERMINATION_SECONDS)
    finally:
        _end(process)
        reader.close()
    if result is not None and exit_code == 0:
        return result
    failure = failure or {"error": _death(exit_code), "message": "", "traceback": ""}
    sender.send(
        {
            **{name: str(text)[-_MAXIMUM_TEXT:] for name, text in failure.items()},
            "kind": "failure",
            "rank": placement.rank,
            "host": placement.host,
            "exit_code": exit_code,
            "last_lines": list(lines),
        }
    )
    if is_consequence(failure):
        # The first failure that Spark sees aborts the stage: let the rank that caused this one speak first.
        time.sleep(_CONSEQUENCE_GRACE_SECONDS)
    raise RuntimeError(f"rank {placement.rank}: {failure['error']} {failure['message']}".strip())


def is_consequence(failure: dict[str, object]) -> bool:
    """Whether a rank failed only because another one did: Horovod tells the survivors by closing down."""
    return "Horovod has been shut down" in str(failure["message"]) or failure["error"] == "HorovodInternalError"


def _give(process: "subprocess.Popen[bytes]", payload: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        process.stdin.flush()
    except BrokenPipeError:
        return  # it died already: its exit code tells


def _listen(
    process: "subprocess.Popen[bytes]", reader: Connection, rank: int, sender: Sender
) -> tuple[bytes | None, dict[str, object] | None]:
    """Pass messages on until the worker has ended; its result and its failure, if any."""
    result = failure = None
    while True:
        try:
            # A child that the worker left behind may hold the other end open: the worker's own end counts too.
            if not reader.poll(_LOOK_SECONDS):
                if process.poll() is not None and not reader.poll():
                    return result, failure
                continue
            frame = reader.recv_bytes()
        except (EOFError, OSError):
            return result, failure
        if frame[:1] == b"R":
            result = frame[1:]
            continue
        message = json.loads(frame[1:])
        if message["kind"] == "failure":
            failure = message
        else:
            sender.send({**message, "rank": rank})


def _forward_log(process: "subprocess.Popen[bytes]", rank: int, sender: Sender, lines: "deque[str]") -> None:
    assert process.stdout is not None
    rest = b""
    while part := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
        # Progress bars end their lines with a carriage return; what ends with nothing at all is cut.
        *whole, rest = _LINE_END.split(rest + part)
        if len(rest) > _MAXIMUM_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        for raw in filter(None, whole):
            _tell(raw, rank, sender, lines)
    if rest:
        _tell(rest, rank, sender, lines)


def _tell(raw: bytes, rank: int, sender: Sender, lines: "deque[str]") -> None:
    line = raw[:_MAXIMUM_LINE_BYTES].decode(errors="replace")
    lines.append(line)
    sender.send({"kind": "log", "rank": rank, "line": line})


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Leave nothing behind: the worker and whatever it started."""
    assert process.stdin is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with suppress(BrokenPipeError):  # what a worker that died had not read
        process.stdin.close()


def _death(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exited with code {exit_code}"
