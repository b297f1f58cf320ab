"""Builds the C++ kernels of the codecs when the project is installed, as a wheel or editable.

Without a compiler, or where it fails, the project installs without them: the codecs then run on TensorFlow's own
operations, which `docker/horovod/install.sh` and every job that compresses say.
"""

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "models/compression/kernels"


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compile before the files of the wheel are collected."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Leave the library beside its sources, and the wheel tagged for this platform and any Python."""
        if self.target_name != "wheel":
            return
        # By path: the packages that the project itself imports are not there.
        builder = runpy.run_path(str(Path(self.root) / KERNELS / "build.py"))
        library, problem = builder["renew"]()
        if problem:
            self.app.display_warning(f"groundswell: the C++ kernels of the codecs were not compiled: {problem}")
        if library is None:
            return
        build_data["artifacts"].append(f"{KERNELS}/{library.name}")
        build_data["pure_python"] = False
        # The library uses TensorFlow's C interface and no Python: one wheel fits every Python and TensorFlow of the
        # ranges in pyproject.toml. Where it does not load, as with an older libc, the codecs run without it.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
