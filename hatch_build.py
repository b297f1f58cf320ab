"""Builds the libraries in C++ when the project is installed, as a wheel or editable.

Without a compiler, or where it fails, the project installs without them: codecs then run on TensorFlow's own
operations, and the reader reads rows in Python. `docker/horovod/install.sh` says so, and so does every job that misses
them.
"""

import runpy
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = {"models/compression/kernels": "libtensorflow_framework.so.2", "pipelines/dataset/gather": ""}
"""By folder of sources the library that it is linked to: TensorFlow is not installed where a wheel is built."""


class LibrariesHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compile before the files of the wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Leave each library beside its sources, and the wheel tagged for this platform and any Python."""
        # Elsewhere the sources are empty, or the library is of no use: clusters are Linux.
        if self.target_name != "wheel" or sys.platform != "linux":
            return
        # By path: the packages that the project itself imports are not there.
        make = runpy.run_path(str(Path(self.root) / "models" / "compiled.py"))["Library"]
        for folder, linked in LIBRARIES.items():
            library, problem = make(Path(self.root) / folder, linked).renew()
            if problem:
                self.app.display_warning(f"groundswell: the C++ of {folder} was not compiled: {problem}")
            if library is None:
                continue
            build_data["artifacts"].append(f"{folder}/{library.name}")
            build_data["pure_python"] = False
            # The libraries use TensorFlow's C interface or none, and no Python: one wheel fits every Python and
            # TensorFlow of the ranges in pyproject.toml. Where one does not load, as with an older libc, the job runs
            # without it.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
