"""The code version of a run."""

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def tags() -> dict[str, str]:
    """Return the tags with the code version of a run."""
    commit = git_revision(Path(__file__))
    return {"groundswell.version": package_version()} | ({"mlflow.source.git.commit": commit} if commit else {})


def package_version() -> str:
    """Return the version of the installed package; `unknown` if it runs from a folder without installation."""
    try:
        return version("groundswell")
    except PackageNotFoundError:
        return "unknown"


def git_revision(file: Path) -> str | None:
    """Return the commit of the repository that tracks `file`, with `-dirty` if it has changes.

    Returns:
        None if no repository tracks the file, as for a package that is installed inside another checkout.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--match=")


def locks() -> dict[str, str]:
    """Return the SHA-256 of each lock file of this package's checkout; none for an installed package."""
    root = Path(__file__).parents[3]
    if git_revision(Path(__file__)) is None:
        return {}
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(root.glob("*.lock"))}


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
