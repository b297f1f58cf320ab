"""How much memory a rank has, holds and needs."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.machine.proc import host_memory, memory_of

_MIB = 1 << 20


@dataclass(frozen=True)
class MemoryLimit:
    """The memory of one rank."""

    bytes: int
    source: str
    """What limits it, for the person at the terminal."""


@dataclass(frozen=True)
class Needs:
    """What one rank is estimated to need, in bytes."""

    weights: int
    """All variables of the model."""
    gradients: int
    """Float32, one for each trainable variable; twice where they are accumulated."""
    optimizer: int
    """All variables of the optimizer."""
    exchange: int
    """What the codec keeps between steps."""
    sample: int
    """Each sample's outputs of all layers, which the backward pass reads, and its images."""
    mode: int = 0
    """What the training mode keeps between steps, such as a second copy of the weights."""

    @property
    def fixed(self) -> int:
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.exchange + self.mode

    def fitting(self, limit: float) -> int:
        """Largest batch that is estimated to fit so many bytes; 0 if none does."""
        return max(0, int((limit - self.fixed) // self.sample))

    def describe(self) -> str:
        """The estimate as text."""
        parts = ("weights", "gradients", "optimizer", "exchange", "mode")
        known = ", ".join(f"{name} {getattr(self, name) / _MIB:,.1f} MiB" for name in parts if getattr(self, name))
        return f"{known}, {self.sample / _MIB:,.2f} MiB for each sample"


def memory_limit(ranks_on_host: int, environment: Mapping[str, str] = os.environ) -> MemoryLimit:
    """Return the memory that one rank may use: its GPU's, or its share of the host's or control group's.

    Args:
        ranks_on_host: Number of ranks that share the host.
        environment: `CUDA_VISIBLE_DEVICES` says which GPU the launcher has assigned.
    """
    gpu = environment.get("CUDA_VISIBLE_DEVICES", "-1")
    if gpu != "-1":
        size = _gpu_memory(gpu)
        return MemoryLimit(size, f"GPU {gpu}, {size / _MIB:,.0f} MiB")
    total, source = host_memory()
    share = f", shared by {ranks_on_host} workers" if ranks_on_host > 1 else ""
    return MemoryLimit(total // ranks_on_host, f"{source}, {total / _MIB:,.0f} MiB{share}")


def resident_peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    return memory_of()["VmHWM"]


def _gpu_memory(gpu: str) -> int:
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return int(answer.splitlines()[0]) * _MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeError(f"nvidia-smi does not say how much memory GPU {gpu} has: {error}") from None
