"""Compiles the kernels. The project's installation calls it, where nothing but a compiler and Python need be there."""

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
# No flag here may change a result from one processor to another.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TENSORFLOW = "libtensorflow_framework.so.2"


def library_name() -> str:
    """Of what these sources make: sources that were changed since find no library rather than an old one."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    return f"{PREFIX}{digest.hexdigest()[:16]}.so"


def renew() -> tuple[Path | None, str]:
    """Build the library of these sources beside them, and remove those of others.

    Returns:
        The library, None where there is none; and why it could not be built, or "". One that was there stays then: by
        its name it is of these sources.
    """
    library, problem = SOURCES / library_name(), ""
    try:
        build(library)
    except (OSError, subprocess.CalledProcessError) as error:
        problem = getattr(error, "stderr", None) or str(error)
    if not library.exists():
        return None, problem
    with suppress(OSError):  # another build was faster, or they are not ours to remove
        for old in set(SOURCES.glob(f"{PREFIX}*.so")) - {library}:
            old.unlink()
    return library, problem


def build(library: Path, flags: Sequence[str] = ()) -> None:
    """Compile and link all sources with the compiler that CXX names, by default g++.

    Args:
        library: To write, in a folder that is there.
        flags: Beside FLAGS.

    Raises:
        OSError: there is no compiler.
        subprocess.CalledProcessError: it failed; what it said is in `stderr`.
    """
    shared = [*shlex.split(os.environ.get("CXX") or "g++"), "-shared", "-fPIC", "-fvisibility=hidden"]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as folder:
        # TensorFlow is not there when a wheel is built: a library of the same name stands in for it until it is loaded.
        stand_in, built, empty = (Path(folder) / name for name in (TENSORFLOW, library.name, "empty.cc"))
        empty.touch()
        _run([*shared, str(empty), "-o", str(stand_in), f"-Wl,-soname,{TENSORFLOW}"])
        sources = sorted(map(str, SOURCES.glob("*.cc")))
        _run([*shared, *FLAGS, *flags, *sources, "-o", str(built), "-Wl,--no-as-needed", str(stand_in)])
        # At once: a process that has the one before open keeps it.
        built.replace(library)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
