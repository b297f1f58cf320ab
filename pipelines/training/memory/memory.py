"""The memory that a rank has, uses and needs."""

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
    """A text for the user that says what limits the memory."""


@dataclass(frozen=True)
class Needs:
    """The estimated memory needs of one rank, in bytes."""

    weights: int
    """All variables of the model."""
    gradients: int
    """Float32 gradients of the trainable variables; twice if they are accumulated."""
    optimizer: int
    """All variables of the optimizer."""
    exchange: int
    """State of the codec between steps."""
    sample: int
    """Images of one sample and its outputs of all layers, which the backward pass reads."""
    mode: int = 0
    """State of the training mode between steps, such as a second copy of the weights."""

    @property
    def fixed(self) -> int:
        """The part that does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.exchange + self.mode

    def fitting(self, limit: float) -> int:
        """Return the largest batch that is estimated to fit into `limit` bytes; 0 if none fits."""
        return max(0, int((limit - self.fixed) // self.sample))

    def describe(self) -> str:
        """Return the estimate as text."""
        parts = ("weights", "gradients", "optimizer", "exchange", "mode")
        known = ", ".join(f"{name} {getattr(self, name) / _MIB:,.1f} MiB" for name in parts if getattr(self, name))
        return f"{known}, {self.sample / _MIB:,.2f} MiB for each sample"


def memory_limit(ranks_on_host: int, environment: Mapping[str, str] = os.environ) -> MemoryLimit:
    """Return the memory that one rank may use: its GPU's, or its share of that of the host or control group.

    Args:
        ranks_on_host: Number of ranks that share the host.
        environment: Environment variables; `CUDA_VISIBLE_DEVICES` names the GPU that the launcher has assigned.
    """
    gpu = environment.get("CUDA_VISIBLE_DEVICES", "-1")
    if gpu != "-1":
        size = _gpu_memory(gpu)
        return MemoryLimit(size, f"GPU {gpu}, {size / _MIB:,.0f} MiB")
    total, source = host_memory()
    share = f", shared by {ranks_on_host} workers" if ranks_on_host > 1 else ""
    return MemoryLimit(total // ranks_on_host, f"{source}, {total / _MIB:,.0f} MiB{share}")


def resident_peak() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    return memory_of()["VmHWM"]


def _gpu_memory(gpu: str) -> int:
    command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return int(answer.splitlines()[0]) * _MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeError(f"nvidia-smi does not say how much memory GPU {gpu} has: {error}") from None
