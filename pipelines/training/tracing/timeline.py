"""Horovod's own timeline of some steps: functions to start, stop and read it, on the clock of rank 0."""

import os
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import horovod.tensorflow as hvd

from pipelines.machine.json_text import parse_json
from pipelines.machine.proc import seconds_of_threads
from pipelines.training.tracing.spans import Event

_VARIABLE, _ON_REQUEST = "HOROVOD_TIMELINE", "DYNAMIC"
_MICRO = 1e-6
_SECONDS_OF_A_LOOK, _POLLS = 0.2, 0.1
"""A thread that uses a tenth of a core while all others wait is polling."""


def allow_timeline() -> None:
    """Let Horovod write a timeline on request; called before the ranks join."""
    os.environ.setdefault(_VARIABLE, _ON_REQUEST)


class Timeline:
    """Horovod's timeline, which only rank 0 writes; it shows all tensors, and when each rank was ready.

    Horovod's timeline thread polls without pause from the start of the job to its end. Except while a timeline is
    written, this class gives it only idle CPU time.
    """

    def __init__(self, rank: int) -> None:
        """Find Horovod's thread.

        Args:
            rank: This rank.
        """
        self.is_ours = os.environ.get(_VARIABLE) == _ON_REQUEST
        """False if HOROVOD_TIMELINE names a user's file. No timeline is then written here."""
        self._thread = _polling_thread() if self.is_ours and rank == 0 else None
        self._schedule(os.SCHED_IDLE)

    def start(self, file: Path) -> None:
        """Start to write a file on rank 0; every rank calls this."""
        if self.is_ours:
            self._schedule(os.SCHED_OTHER)
            hvd.start_timeline(str(file))

    def stop(self) -> None:
        """Stop the timeline; the file is then complete."""
        if self.is_ours:
            hvd.stop_timeline()
            self._schedule(os.SCHED_IDLE)

    def _schedule(self, policy: int) -> None:
        if self._thread is not None:
            with suppress(OSError):  # not every user may raise the priority; the thread then writes when it can
                os.sched_setscheduler(self._thread, policy, os.sched_param(0))


def _polling_thread() -> int | None:
    """Return the thread of this process, not one of Python's, that runs all the time; None if there is none."""
    before, started = seconds_of_threads(), time.perf_counter()
    time.sleep(_SECONDS_OF_A_LOOK)
    wall, after = time.perf_counter() - started, seconds_of_threads()
    of_python = {thread.native_id for thread in threading.enumerate()}
    used = {thread: seconds - before.get(thread, seconds) for thread, seconds in after.items()}
    foreign = [thread for thread in used if thread not in of_python]
    busiest = max(foreign, key=used.__getitem__, default=None)
    return busiest if busiest is not None and used[busiest] > _POLLS * wall else None


def read_timeline(file: Path) -> list[Event]:
    """Return complete events of Horovod's timeline, with seconds since 1970 in `ts` and `dur`, one thread per tensor.

    Events that did not end are left out. The moment at which a rank was ready has the duration 0.

    Args:
        file: Horovod's file; a missing or empty file has no events.
    """
    text = file.read_text() if file.is_file() else ""
    if not text:
        return []
    begin, tensors = 0.0, dict[int, str]()
    opened: dict[int, list[Event]] = defaultdict(list)
    events: list[Event] = []
    for line in parse_json(text):
        arguments, thread = line.get("args", {}), line.get("pid", 0)
        if line["ph"] == "M":
            begin = _MICRO * arguments.get("start_time_since_epoch_in_micros", begin / _MICRO)
            if "name" in arguments:
                tensors[thread] = arguments["name"]
            continue
        seconds = begin + _MICRO * line["ts"]
        if line["ph"] == "E":
            if opened[thread]:
                event = opened[thread].pop()
                events.append({**event, "dur": seconds - event["ts"]})
            continue
        is_ready = line["ph"] == "X"
        name = f"rank {line['name']} is ready" if is_ready else line["name"]
        event = {
            "name": name,
            "cat": "horovod",
            "ph": "X",
            "tid": thread,
            "ts": seconds,
            "dur": 0.0,
            "args": {"tensor": tensors.get(thread, ""), **arguments},
        }
        (events if is_ready else opened[thread]).append(event)
    return events
