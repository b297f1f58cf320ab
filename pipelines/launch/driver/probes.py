"""Connections of the driver to silent tasks: they show whether a task's process lives and its host has a network."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pipelines.launch.driver.members import AttemptMember
from pipelines.launch.driver.preflight import answers
from pipelines.launch.wire.messages import Hello

SILENT_SECONDS = 5.0
"""Seconds that a task may be silent before the driver probes its host."""
_GONE_SECONDS = 3.0
_LOOK_SECONDS = 0.1
_PROBES_AT_ONCE = 64
_log = logging.getLogger(__name__)


class HostProbes:
    """Probes tasks from threads, all at once, while the driver handles messages."""

    def __init__(self, seconds_silent: Callable[[int], float]) -> None:
        """Store the function; nothing starts yet.

        Args:
            seconds_silent: Returns the seconds since a task's last message.
        """
        self._seconds_silent = seconds_silent
        self.unreachable_hosts: set[str] = set()
        """The hosts of executors that can connect to this driver but not be reached from it."""
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(_PROBES_AT_ONCE, thread_name_prefix="groundswell-probe")

    def begin(self, task: int, hello: Hello) -> Future[bool]:
        """Find out whether the driver can connect to the port of a new task: a firewall may be between them."""
        return self._threads.submit(self._can_be_probed, task, hello)

    def probe(self, member: AttemptMember) -> Future[bool]:
        """Find out whether a task's own port answers; a task that could never be probed counts as one that answers."""
        first, host, port = member.first_probe, member.host, member.hello.probe_port
        # The first probes are queued before all others, so no probe waits here for one behind it in the queue.
        return self._threads.submit(lambda: first is None or port is None or not first.result() or answers(host, port))

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _can_be_probed(self, task: int, hello: Hello) -> bool:
        if hello.probe_port is None:
            return False
        began = time.monotonic()
        if answers(hello.host, hello.probe_port):
            return True
        # A failed probe proves a blocked network only if the task still sends messages afterwards.
        while (silent := self._seconds_silent(task)) > time.monotonic() - began:
            if silent > SILENT_SECONDS or self._closed.wait(_LOOK_SECONDS):
                return True
        if not self.unreachable_hosts:
            _log.warning(
                "the driver cannot connect to %s, whose task has connected to the driver: where such a host is lost, "
                "Spark alone says so, after minutes",
                hello.host,
            )
        self.unreachable_hosts.add(hello.host)
        return False


def is_silent(seconds_gone: float | None, seconds_silent: float) -> bool:
    """Return whether a task needs a probe.

    Args:
        seconds_gone: Seconds since its connection ended; None: it is connected.
        seconds_silent: Seconds since its last message, without pauses of the driver.
    """
    return (seconds_gone is not None and seconds_gone > _GONE_SECONDS) or seconds_silent >= SILENT_SECONDS


def is_probe_due(seconds_since_probe: float) -> bool:
    """Return whether enough time has passed since the latest probe of a silent task."""
    return seconds_since_probe > SILENT_SECONDS
