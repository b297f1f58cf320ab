"""Allows one job at a time where files cannot be locked: each job refreshes a small object, its lease.

Each job writes a lease under its own name and then lists all leases. So at least one of two jobs sees the other, in
any order. Ages are measured by the storage's clock.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from pipelines.machine.json_text import parse_json
from pipelines.machine.proc import boot, is_process, namespace
from pipelines.storage.folder import Location
from pipelines.storage.locations import redacted_traceback

PROGRESS_FOLDER = "_progress"
"""Folder in a job's output folder for the state of its unfinished result."""
LEASE_PREFIX = "lease-"
REFRESH_SECONDS = 10.0
DEAD_SECONDS = 60.0
_log = logging.getLogger(__name__)


@contextmanager
def lease(folder: Location, inside: str, output: Location | None = None) -> Iterator[str]:
    """Hold a folder; yield the path of the lease in it, `<inside>/lease-<random id>.json`.

    A lease is dead if it was not refreshed for `DEAD_SECONDS`, or at once if its process ran on this machine and has
    ended.

    Args:
        folder: Folder on the storage whose clock measures the ages.
        inside: Path of the folder of leases in it.
        output: What the job writes, for messages; None: the folder.

    Raises:
        RuntimeError: Another job holds the folder.
    """
    name = f"{inside}/{LEASE_PREFIX}{uuid.uuid4().hex}.json"
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}
    folder.write(name, json.dumps(owner).encode())
    with ExitStack() as ending:
        ending.callback(_remove, folder, name)
        # First list the dead leases in ours, then delete them: an owner that only looked dead may rewrite its lease.
        dead_ones = _dead_ones(folder, inside, name, output or folder)
        content = json.dumps(owner | {"replaces": dead_ones}).encode()
        folder.write(name, content)
        for dead in dead_ones:
            folder.remove(f"{inside}/{dead}")
        ended = threading.Event()
        thread = threading.Thread(
            target=_keep, args=(folder, name, content, ended), name="groundswell-lease", daemon=True
        )
        thread.start()
        ending.callback(thread.join)
        ending.callback(ended.set)  # the callbacks run in the opposite order
        yield name


def _remove(folder: Location, name: str) -> None:
    try:
        folder.remove(name)
    except (OSError, RuntimeError) as error:  # an earlier error must not be hidden by this one
        _log.warning("%s cannot be removed (%s): the folder is free again in %g s", name, error, DEAD_SECONDS)


def check_owner(folder: Location, inside: str, output: Location | None = None) -> None:
    """Make sure, before a step that cannot be undone, that no other job has replaced this one's lease.

    The arguments are those of `lease`.

    Raises:
        RuntimeError: Another job has replaced it.
    """
    own = {"pid": os.getpid(), "machine": _machine()}
    if not any(own.items() <= owner.items() for owner in _valid(folder, inside).values()):
        raise RuntimeError(
            f"{output or folder}: another job took over, as by the storage's clock this one gave no sign for "
            f"{DEAD_SECONDS:.0f} s: the storage was out of reach, or this job was suspended, or the clock has jumped"
        )


def _valid(folder: Location, inside: str) -> dict[str, dict[str, Any]]:
    """Return the owners by lease, without replaced leases."""
    names = [name for name in folder.names(inside) if name.startswith(LEASE_PREFIX)]
    leases = {name: _owner(folder, f"{inside}/{name}") for name in names}
    replaced = {name for owner in leases.values() for name in owner.get("replaces", [])}
    return {name: owner for name, owner in leases.items() if name not in replaced}


def _dead_ones(folder: Location, inside: str, own: str, output: Location) -> list[str]:
    """Return the names of the leases of jobs that have ended; raise an error if another job is running."""
    dead = []
    now = folder.modified(own)
    others = [name for name in folder.names(inside) if name.startswith(LEASE_PREFIX) and f"{inside}/{name}" != own]
    for other in others:
        path = f"{inside}/{other}"
        written = folder.modified(path)
        if now is None or written is None:  # removed just now
            continue
        age = (now - written).total_seconds()
        owner = _owner(folder, path)
        # Only on this machine its process can be looked up.
        has_ended = owner.get("machine") == _machine() and not is_process(owner.get("pid"))
        if age <= DEAD_SECONDS and not has_ended:
            seen = f"seen {age:.0f} s ago" if age >= 0 else f"seen {-age:.0f} s in the future, as the clock has jumped"
            raise RuntimeError(
                f"another job is writing {output} (process {owner.get('pid')} on {owner.get('host')}, {seen}): wait "
                f"for it, or stop it; a job that was killed counts as stopped {DEAD_SECONDS:.0f} s after its last "
                f"sign, or remove {folder}/{path}"
            )
        dead.append(other)
    return dead


def _owner(folder: Location, path: str) -> dict[str, Any]:
    try:
        values = parse_json(folder.read(path))
    except (FileNotFoundError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _machine() -> str:
    """Return an id of this boot and of the process namespace, because a container has its own process numbers."""
    return boot() + namespace("pid")


def _keep(folder: Location, name: str, owner: bytes, ended: threading.Event) -> None:
    inside, _, own = name.rpartition("/")
    refreshed = time.monotonic()
    while not ended.wait(REFRESH_SECONDS):
        try:
            # Read the list of leases: on a disk that does not answer, this raises an error, and a file seems missing.
            if own not in _valid(folder, inside):  # another job took this one for dead, and continues
                return
            folder.write(name, owner)
            refreshed = time.monotonic()
        except Exception:
            _log.warning(
                "%s: lease not refreshed for %.0f s: %s", folder, time.monotonic() - refreshed, redacted_traceback()
            )
