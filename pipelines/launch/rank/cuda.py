"""The CUDA version that a host's NVIDIA driver supports, and the one that TensorFlow needs; neither is loaded."""

import re
import runpy
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pipelines.machine.proc import nvidia_kernel_module

# By CUDA's major version: the oldest driver that supports all its minor versions. NVIDIA, CUDA Compatibility, "Minor
# Version Compatibility", table 1: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}


@cache
def complaint() -> str:
    """Return why TensorFlow would see no GPU on this host; empty if it would, or if a version is not known.

    From CUDA 11 on, a driver supports every CUDA of the same or an earlier major version. TensorFlow itself only logs a
    warning, and trains on the processor.
    """
    needed = _needed()
    if needed is None:
        return ""
    served = served_by(_nvidia_smi(), nvidia_kernel_module())
    major = int(needed.partition(".")[0])
    if served is None or served >= major:
        return ""
    oldest = _OLDEST_DRIVERS.get(major)
    driver = f"an NVIDIA driver of version {oldest} or newer" if oldest else "a newer NVIDIA driver"
    return (
        f"its NVIDIA driver serves CUDA {served}, and this TensorFlow is built for CUDA {needed}, so that it would "
        f"train on the CPU: install {driver}, or a TensorFlow for CUDA {served}"
    )


def served_by(nvidia_smi: str, kernel_module: str) -> int | None:
    """Return the newest major version of CUDA that a driver supports; None if it is unknown.

    Args:
        nvidia_smi: Output of `nvidia-smi`. Its header includes a compatibility package, which the driver does not know.
        kernel_module: Content of `/proc/driver/nvidia/version`.
    """
    if match := re.search(r"CUDA Version:\s*(\d+)\.\d+", nvidia_smi):
        return int(match[1])
    if match := re.search(r"Kernel Module.*?\s(\d{3,})\.\d+", kernel_module):
        served = [major for major, oldest in _OLDEST_DRIVERS.items() if int(match[1]) >= oldest]
        return max(served, default=min(_OLDEST_DRIVERS) - 1)
    return None


def _needed() -> str | None:
    """Return the CUDA version in TensorFlow's build file; importing TensorFlow would take ten seconds."""
    spec = find_spec("tensorflow")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, "python/platform/build_info.py")
        if file.is_file():
            version = runpy.run_path(str(file)).get("build_info", {}).get("cuda_version")
            return str(version) if version else None
    return None


def _nvidia_smi() -> str:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20.0).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
