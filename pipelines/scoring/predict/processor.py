"""Processor instructions that fast inference needs."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pipelines.machine.proc import CPUINFO, processor

Runtime = Literal["keras", "bf16", "int8"]
"""Runtime of predictions: Keras in float32, or OpenVINO with smaller numbers."""

_NEEDED: dict[Runtime, tuple[str, ...]] = {
    "keras": (),
    "bf16": ("avx512_bf16", "amx_bf16"),
    # Without them 8-bit products are added in 16 bits, which overflow.
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8"),
}


def used_features(runtime: Runtime, cpu_info: Path = CPUINFO) -> list[str]:
    """Return the instructions of this processor that a runtime uses, by their names in `/proc/cpuinfo`."""
    flags = processor(cpu_info).get("flags", "").split()
    return [name for name in _NEEDED[runtime] if name in flags]


def why_unusable(runtime: Runtime, cpu_info: Path = CPUINFO) -> str | None:
    """Return why this machine should not use a runtime; None if it should."""
    if runtime == "keras":
        return None
    if find_spec("openvino") is None:
        return "the package openvino is not installed"
    if not used_features(runtime, cpu_info):
        return f"the processor has none of {', '.join(_NEEDED[runtime])}"
    return None
