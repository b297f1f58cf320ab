"""Packages and code of this project that a process uses; executors must have the same as the driver."""

import hashlib
import importlib.resources
import platform
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources.abc import Traversable

OWN = "groundswell"
NOT_INSTALLED = "none"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that ranks need; "none" for one that is not installed.

    The version of this project is followed by a digest of its code, read from the disk at every call.
    """
    packages = ("tensorflow", "tensorflow-cpu", "keras", "horovod")
    return {
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
        OWN: own_version(),
    }


def own_version() -> str:
    """Return the version of this project and the digest of its code, such as "1.0.0 (code 5f0c21a9d3e7)"."""
    folders = [importlib.resources.files(package) for package in ("conf", "models", "pipelines")]
    return f"{version_of(OWN)} (code {digest_of(folders)})"


@cache
def imported_version() -> str:
    """Return `own_version()` from this process's first call, because the files may change while it runs.

    The driver calls this when it imports the code that starts ranks and tasks, and an executor in its first task.
    """
    return own_version()


def digest_of(folders: Iterable[Traversable]) -> str:
    """Return the first digits of the SHA-256 of all Python files below these folders, which may be in a zip file."""
    found = hashlib.sha256()
    for folder in folders:
        for path, file in _python_files(folder, folder.name):
            content = file.read_bytes()
            found.update(f"{path}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:12]


def _python_files(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            yield from _python_files(each, f"{path}/{each.name}")
        elif each.name.endswith(".py"):
            yield f"{path}/{each.name}", each


def version_of(package: str) -> str:
    """Return the version of an installed package, or `NOT_INSTALLED`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED


def check_code(drivers: str, executors: str, host: str) -> None:
    """Check that an executor has the driver's code.

    Args:
        drivers: The driver's `imported_version()`.
        executors: The version that the executor would run.
        host: Host of the executor, for the message.

    Raises:
        RuntimeError: The codes differ.
    """
    # Code that spark-submit sent in a zip file is the same, although no package is installed.
    if drivers.partition(" (code ")[2] != executors.partition(" (code ")[2]:
        raise RuntimeError(
            f"the driver runs {OWN} {drivers}, and the executor on {host} would run {executors}: install one version "
            "for the driver and all executors; if files have changed since the driver imported them, start the driver "
            "again (a notebook: its Python)"
        )


def check_this_executor(drivers: str) -> None:
    """Check in a Spark task that its process has the driver's code, given the driver's `imported_version()`.

    Raises:
        RuntimeError: The codes differ.
    """
    check_code(drivers, imported_version(), platform.node())
