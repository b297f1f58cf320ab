"""Which code a run was made with."""

import hashlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_DISTRIBUTION = "groundswell"


def tags() -> dict[str, str]:
    """Return the tags that say which code made a run."""
    commit = git_revision(Path(__file__))
    return {"groundswell.version": package_version()} | ({"mlflow.source.git.commit": commit} if commit else {})


def package_version() -> str:
    """Version of the installed package; `unknown` where it runs from a folder that was never installed."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def git_revision(file: Path) -> str | None:
    """Return the commit of the repository that tracks `file`, with `-dirty` where the repository was changed.

    Returns:
        None where no repository tracks the file: a package that is installed inside somebody's checkout.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", "--", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--match=")


def locks() -> dict[str, str]:
    """Return the SHA-256 of each lock file of the checkout from which this package runs; none of an installed one."""
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
