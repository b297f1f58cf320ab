"""The peak performance of NVIDIA's GPUs by name; benchmarks without TensorFlow also use it."""

import re

_HALF, _SINGLE = ("bfloat16", "float16"), "float32"
# Teraflops of dense products. The float32 figure is that of TF32 if the GPU has it, because frameworks use it.
# Source: the data sheets "NVIDIA <name> Tensor Core GPU" (H200, H100, A100, A40, A10, L40S, L40, L4, T4), "NVIDIA
# V100S" and "NVIDIA DGX B200". Figures stated with sparsity are halved. The A10G is from EC2's page of G5 instances.
_AMPERE_AND_LATER = {
    "B200": (2250.0, 1125.0),
    "H200 NVL": (835.5, 417.7),
    "H200": (989.4, 494.7),
    "H100 NVL": (835.5, 417.7),
    "H100 PCIe": (756.0, 378.0),
    "H100": (989.4, 494.7),
    "A100": (312.0, 156.0),
    "A40": (149.7, 74.8),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 62.5),
    "L40S": (362.0, 183.0),
    "L40": (181.0, 90.5),
    "L4": (121.0, 60.0),
}
"""Peaks of bfloat16 and float16, and of float32. A name that is a prefix of another name comes after it."""
_WITHOUT_BFLOAT16 = {"V100S": (130.0, 16.4), "V100-PCIE": (112.0, 14.0), "V100": (125.0, 15.7), "T4": (65.0, 8.1)}
"""Peaks of float16 and float32."""


def flops_per_second_of_gpu(name: str, precision: str) -> float | None:
    """Return the peak of dense products; None if it is unknown or the GPU has no unit for the precision.

    Args:
        name: Name of the device, as its driver reports it.
        precision: "float32", "bfloat16" or "float16".
    """
    for table, half in ((_AMPERE_AND_LATER, _HALF), (_WITHOUT_BFLOAT16, ("float16",))):
        for part, (of_half, of_single) in table.items():
            if re.search(rf"\b{part}\b", name):
                teraflops = of_half if precision in half else of_single if precision == _SINGLE else None
                return None if teraflops is None else teraflops * 1e12
    return None
