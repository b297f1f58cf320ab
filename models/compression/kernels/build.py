"""Compiles the kernels when the project is installed; needs only Python and a C++ compiler."""

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent
PREFIX = "groundswell_kernels_"
# No flag here may make results differ between processors.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TENSORFLOW = "libtensorflow_framework.so.2"


def library_name() -> str:
    """Return the library's name, with a digest of sources and flags: a library of older sources is never loaded."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    return f"{PREFIX}{digest.hexdigest()[:16]}.so"


def renew() -> tuple[Path | None, str]:
    """Build the library of these sources in their folder, and remove libraries of older sources.

    Returns:
        The library, or None if there is none, and the reason why it could not be built, or "". If the build fails, an
        existing library of the same name stays: its name says that it was built from these sources.
    """
    library, problem = SOURCES / library_name(), ""
    try:
        build(library)
    except (OSError, subprocess.CalledProcessError) as error:
        problem = getattr(error, "stderr", None) or str(error)
    if not library.exists():
        return None, problem
    with suppress(OSError):  # another build removed them first, or we may not
        for old in set(SOURCES.glob(f"{PREFIX}*.so")) - {library}:
            old.unlink()
    return library, problem


def build(library: Path, flags: Sequence[str] = ()) -> None:
    """Compile and link all sources with the compiler that CXX names, by default g++.

    Args:
        library: File to write, in an existing folder.
        flags: Flags in addition to FLAGS.

    Raises:
        OSError: there is no compiler.
        subprocess.CalledProcessError: the compiler failed; its messages are in `stderr`.
    """
    shared = [*shlex.split(os.environ.get("CXX") or "g++"), "-shared", "-fPIC", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as folder:
        # TensorFlow is not installed when a wheel is built: we link against an empty library of the same name.
        stand_in, built, empty = (Path(folder) / name for name in (TENSORFLOW, library.name, "empty.cc"))
        empty.touch()
        _run([*shared, str(empty), "-o", str(stand_in), f"-Wl,-soname,{TENSORFLOW}"])
        sources = sorted(map(str, SOURCES.glob("*.cc")))
        _run([*shared, *FLAGS, *flags, *sources, "-o", str(built), "-Wl,--no-as-needed", str(stand_in)])
        # Atomic: a process that has the old file open keeps it.
        built.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
