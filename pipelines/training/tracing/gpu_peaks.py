"""The peak performance of NVIDIA's GPUs by name; benchmarks without TensorFlow also use it."""

import re

_PRECISIONS = ("float32", "bfloat16", "float16")
# Teraflops of dense products. The float32 figure is that of TF32 if the GPU has it, because frameworks use it.
# Source: the data sheets "NVIDIA <name> Tensor Core GPU" (H200, H100, A100, A40, A10, L40S, L40, L4, T4), "NVIDIA
# V100S" and "NVIDIA DGX B200". Figures stated with sparsity are halved. The A10G is from EC2's page of G5 instances.
_TERAFLOPS = {
    "B200": (1125.0, 2250.0, 2250.0),
    "H200 NVL": (417.7, 835.5, 835.5),
    "H200": (494.7, 989.4, 989.4),
    "H100 NVL": (417.7, 835.5, 835.5),
    "H100 PCIe": (378.0, 756.0, 756.0),
    "H100": (494.7, 989.4, 989.4),
    "A100": (156.0, 312.0, 312.0),
    "A40": (74.8, 149.7, 149.7),
    "A10G": (35.0, 70.0, 70.0),
    "A10": (62.5, 125.0, 125.0),
    "L40S": (183.0, 362.0, 362.0),
    "L40": (90.5, 181.0, 181.0),
    "L4": (60.0, 121.0, 121.0),
    "V100S": (16.4, None, 130.0),
    "V100-PCIE": (14.0, None, 112.0),
    "V100": (15.7, None, 125.0),
    "T4": (8.1, None, 65.0),
}
"""Peaks of `_PRECISIONS`; None: there is no unit. A name that is a prefix of another name comes after it."""


def flops_per_second_of_gpu(name: str, precision: str) -> float | None:
    """Return the peak of dense products; None if it is unknown or the GPU has no unit for the precision.

    Args:
        name: Name of the device, as its driver reports it.
        precision: "float32", "bfloat16" or "float16".
    """
    for part, peaks in _TERAFLOPS.items():
        if re.search(rf"\b{part}\b", name):
            teraflops = dict(zip(_PRECISIONS, peaks, strict=True)).get(precision)
            return None if teraflops is None else teraflops * 1e12
    return None
