"""The precision of forward and backward pass, and its support on this machine."""

import logging
from pathlib import Path

import tensorflow as tf

from pipelines.launch.rank import membership
from pipelines.launch.rank.report import log_to_driver
from pipelines.machine.proc import CPUINFO, processor
from pipelines.training.ranks.collective import HorovodCollective

_log = logging.getLogger(__name__)
_ISAS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16"}


def bfloat16_isa(cpuinfo: Path = CPUINFO) -> str | None:
    """Return the processor's fastest instruction set for bfloat16: "amx_bf16", "avx512_bf16" or None."""
    flags = processor(cpuinfo).get("flags", "").split()
    return next((isa for isa in _ISAS if isa in flags), None)


def is_faster_in_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether training was faster in bfloat16 than in float32 on processors of this kind.

    It was with Intel's AMX, and with AVX-512 BF16 of AMD's Zen 4 (tests/benchmarks/RESULTS.md). It was slower with
    AVX-512 BF16 of an Intel Xeon without AMX.
    """
    isa = bfloat16_isa(cpuinfo)
    return isa == "amx_bf16" or (isa is not None and processor(cpuinfo).get("vendor_id") == "AuthenticAMD")


def describe_precision(precision: str, *, gpu: bool, isa: str | None, faster: bool) -> str:
    """Return a line with the training precision and, on a CPU, the processor's instructions for it.

    Args:
        precision: The setting `training.precision`.
        gpu: Whether this rank trains on a GPU.
        isa: The result of `bfloat16_isa`.
        faster: The result of `is_faster_in_bfloat16`.
    """
    text = f"training.precision={precision}"
    if gpu:
        return f"{text} on a GPU"
    if isa is None:
        slow = ", so this is slower than float32" if precision == "bfloat16" else ""
        return f"{text}; the processor has no instructions for bfloat16{slow}"
    if precision == "bfloat16":
        slow = "" if faster else ", with which this was slower than float32 where it was measured"
        return f"{text}; the processor has {_ISAS[isa]} for it{slow}"
    hint = f"; the processor has {_ISAS[isa]}, with which training.precision=bfloat16 was faster" if faster else ""
    return f"{text}{hint}"


def tell_precision(precision: str, collective: HorovodCollective) -> None:
    """Write the precision to the rank's log; rank 0 also sends it to the driver.

    Args:
        precision: The setting `training.precision`.
        collective: The ranks.
    """
    text = describe_precision(
        precision,
        gpu=bool(tf.config.list_physical_devices("GPU")),
        isa=bfloat16_isa(),
        faster=is_faster_in_bfloat16(),
    )
    _log.info("rank %d: %s", collective.rank, text)
    if collective.rank == 0 and not membership.is_spare():
        log_to_driver(text)
