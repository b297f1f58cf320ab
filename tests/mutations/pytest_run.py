"""One run of pytest that ends at its first failure, with all processes that come from it."""

import ctypes
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.mutations.measure import pytest_environment

_SET_CHILD_SUBREAPER, _KILL_SECONDS, _KILL_ROUNDS = 36, 10.0, 5
_UNKNOWN = re.compile(r"^ERROR: not found: (.+)$", re.MULTILINE)


class Ended(NamedTuple):
    """How a run of pytest ended."""

    code: int
    failed: list[str]
    """Tests, or files that cannot be imported."""
    unknown: list[str]
    """Tests that pytest does not find."""
    is_late: bool
    """It was killed at its limit."""


def run_pytest(project: Path, tests: Sequence[str], limit: float, log: Path) -> Ended:
    """Run tests of a checkout up to the first failure; its output is appended to a file.

    Args:
        project: The checkout, with its own environment.
        tests: Tests or files.
        limit: Seconds after which it is killed.
        log: The file.
    """
    with tempfile.TemporaryDirectory(prefix="groundswell-mutation-") as folder, log.open("a+") as output:
        begin = output.seek(0, 2)
        command = [project / ".venv/bin/pytest", "-x", "-q", "-o", f"cache_dir={folder}/cache", *tests]
        code, is_late = _run(command, project, limit, output.fileno())
        output.seek(begin)
        unknown = [name.removeprefix(f"{project}/") for name in _UNKNOWN.findall(output.read())]
        failed = Path(folder) / "cache/v/cache/lastfailed"
        return Ended(code, list(json.loads(failed.read_text())) if failed.exists() else [], unknown, is_late)


def adopt_orphans() -> None:
    """Make processes whose parents have ended children of this one, so that `run_pytest` can end them too."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _run(command: Sequence[str | Path], project: Path, limit: float, output: int) -> tuple[int, bool]:
    others = set(psutil.Process().children())
    process = subprocess.Popen(
        command, cwd=project, env=pytest_environment(project), stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )
    try:
        return process.wait(limit), False
    except subprocess.TimeoutExpired:
        return -1, True
    finally:
        _end(process, others)


def _end(process: subprocess.Popen[bytes], others: set[psutil.Process]) -> None:
    """End a process and all that come from it; each that is killed can leave orphans."""
    process.kill()
    process.wait()
    for _ in range(_KILL_ROUNDS):
        for child in set(psutil.Process().children()) - others:
            with suppress(psutil.Error):
                for each in (child, *child.children(recursive=True)):
                    each.kill()
                child.wait(_KILL_SECONDS)
