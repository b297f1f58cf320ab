"""The performance of a processor: its nominal peak, and the rate of a matrix product."""

import os
import re
import timeit
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

from models.layers.augmentation import AugmentedModel
from models.networks.operations import forward_flops
from pipelines.machine.proc import processor
from pipelines.training.record.summary import Computer
from pipelines.training.tracing.gpu_peaks import flops_per_second_of_gpu

_SIDE, _ROUNDS = 1024, 5
# Operations per cycle of a core with two fused multiply-add units: 2 units * 2 operations * numbers per vector.
_PER_CYCLE = {
    "float32": (("avx512f", 64), ("avx2", 32), ("avx", 16)),
    "bfloat16": (("amx_bf16", 2048), ("avx512_bf16", 128)),
}
# Cores that compute AVX-512 at half this rate: AMD's Zen 4 (family 25) splits each operation in two. These Intel cores
# have one unit of that width (Gold 5122 and 5222 have two).
_HALF_WIDTH_FAMILY = "25"
_ONE_UNIT = re.compile(r"Xeon.*(Bronze 3[12]\d\d|Silver 4[12]\d\d|Gold 5[12](?!22)\d\d)|Core\(TM\)(?!.*\d{4}XE?\b)")


def computer_of(model: keras.Model, precision: str, ranks: int) -> Computer:
    """Measure the properties of model and device for a run's summary; only rank 0 calls this.

    Args:
        model: The model that was trained.
        precision: The value of `training.precision`.
        ranks: Number of ranks.
    """
    network = model.network if isinstance(model, AugmentedModel) else model
    return Computer(
        ranks,
        sum(int(np.prod(variable.shape)) for variable in model.trainable_variables),
        forward_flops(network),
        matmul_flops_per_second(precision),
        nominal_flops_per_second(precision),
    )


def matmul_flops_per_second(precision: str) -> float:
    """Measure the rate of a product of two square matrices on this rank's device, as the fastest of some rounds.

    Args:
        precision: "float32", "bfloat16" or "float16".
    """
    matrix = tf.ones((_SIDE, _SIDE), tf.as_dtype(precision))
    product = tf.function(lambda: tf.reduce_sum(tf.matmul(matrix, matrix)))
    float(product())
    return 2.0 * _SIDE**3 / min(timeit.repeat(lambda: float(product()), number=1, repeat=_ROUNDS))


def nominal_flops_per_second(
    precision: str, cores: int | None = None, values: Mapping[str, str] | None = None
) -> float | None:
    """Return the nominal peak of this rank's GPU or cores; None if it is unknown.

        cores * clock * operations per cycle

    The clock is read from `/proc/cpuinfo`, which may be wrong on a virtual machine. Hyperthreads share a core.

    Args:
        precision: "float32", "bfloat16" or "float16".
        cores: Number of logical cores; None: the threads assigned to this rank, or all that it may use.
        values: Values of `/proc/cpuinfo` by name; None: those of this machine.
    """
    if values is None:
        gpus = tf.config.get_visible_devices("GPU")
        if gpus:
            details = tf.config.experimental.get_device_details(gpus[0])
            return flops_per_second_of_gpu(str(details.get("device_name", "")), precision)
        values = processor()
    per_cycle = _per_cycle(values, precision)
    if per_cycle is None or "cpu MHz" not in values:
        return None
    logical = cores or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or len(os.sched_getaffinity(0)))
    per_core = int(values.get("siblings", 1)) / int(values.get("cpu cores", values.get("siblings", 1)))
    return max(1.0, logical / per_core) * float(values["cpu MHz"]) * 1e6 * per_cycle


def _per_cycle(values: Mapping[str, str], precision: str) -> float | None:
    """Return the operations of one core per cycle."""
    flags = values.get("flags", "").split()
    amd = values.get("vendor_id") == "AuthenticAMD"
    halved = values.get("cpu family") == _HALF_WIDTH_FAMILY if amd else _ONE_UNIT.search(values.get("model name", ""))
    for flag, count in _PER_CYCLE.get(precision, ()):
        if flag in flags:
            return count / 2 if halved and flag.startswith("avx512") else count
    return None
