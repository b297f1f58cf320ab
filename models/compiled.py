"""C++ libraries that are compiled during the installation; only Python and a C++ compiler are needed."""

import hashlib
import logging
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

Loaded = TypeVar("Loaded")
PREFIX = "groundswell_"
# No flag here may make results differ between processors.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


@dataclass(frozen=True)
class Library:
    """The library of all C++ sources of one folder, built in that folder."""

    folder: Path
    linked: str = ""
    """Name of a library that exists where this one is loaded, but not where it is built; "": none."""

    @property
    def path(self) -> Path:
        """The library's file; a digest of sources and flags in its name excludes libraries of older sources."""
        digest = hashlib.sha256(" ".join(FLAGS).encode())
        for source in sorted([*self.folder.glob("*.cc"), *self.folder.glob("*.h")]):
            digest.update(source.read_bytes())
        return self.folder / f"{PREFIX}{self.folder.name}_{digest.hexdigest()[:16]}.so"

    def renew(self) -> tuple[Path | None, str]:
        """Build the library of these sources, and remove libraries of older sources.

        Returns:
            The library or None, and the reason why the build failed or "". After a failed build, an existing library of
            the same name stays: its name proves that it was built from these sources.
        """
        path, problem = self.path, ""
        try:
            self.build(path)
        except (OSError, subprocess.CalledProcessError) as error:
            problem = getattr(error, "stderr", None) or str(error)
        if not path.exists():
            return None, problem
        with suppress(OSError):  # another build removed them first, or permissions are missing
            for old in set(self.folder.glob(f"{PREFIX}*.so")) - {path}:
                old.unlink()
        return path, problem

    def build(self, path: Path, flags: Sequence[str] = ()) -> None:
        """Compile and link all sources with the compiler that CXX names, by default g++.

        Args:
            path: File to write, in an existing folder.
            flags: Flags in addition to FLAGS.

        Raises:
            OSError: There is no compiler.
            subprocess.CalledProcessError: The compiler failed; its messages are in `stderr`.
        """
        shared = [*shlex.split(os.environ.get("CXX") or "g++"), "-shared", "-fPIC", "-fvisibility=hidden"]
        with tempfile.TemporaryDirectory(prefix=".build-", dir=path.parent) as folder:
            built, linked = Path(folder) / path.name, []
            if self.linked:
                # An empty library of the same name replaces it for the linker.
                stand_in, empty = Path(folder) / self.linked, Path(folder) / "empty.cc"
                empty.touch()
                _run([*shared, str(empty), "-o", str(stand_in), f"-Wl,-soname,{self.linked}"])
                linked = ["-Wl,--no-as-needed", str(stand_in)]
            _run([*shared, *FLAGS, *flags, *sorted(map(str, self.folder.glob("*.cc"))), "-o", str(built), *linked])
            # The replacement is atomic: a process that has opened the old file keeps it.
            built.replace(path)


def load(
    path: Path, open_library: Callable[[str], Loaded], without: str, *, failure: type[Exception] = OSError
) -> Loaded | None:
    """Open a library; None, with a line in the log: it is missing or cannot be opened.

    Args:
        path: The library's file. It is missing in a .zip of --py-files, from which no library can be loaded.
        open_library: Opens the library at a path; a `failure` says why this was impossible.
        without: Consequence of a missing library, for the log.
        failure: Type of the exception of `open_library`.
    """
    log = logging.getLogger(__name__)
    if not path.exists():
        log.warning("there is no %s: %s", path, without)
        return None
    try:
        return open_library(str(path))
    except failure as error:
        log.warning("%s does not load: %s: %s", path, without, error)
        return None


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
