from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from pipelines.training.ranks.collective import gather_json
from pipelines.training.record.observer import StepMeasurements
from pipelines.training.record.phases import divide
from pipelines.training.step.loop import EpochResult
from pipelines.training.step.step import StepClocks
from pipelines.training.tracing.gpu_peaks import flops_per_second_of_gpu
from pipelines.training.tracing.peak import matmul_flops_per_second, nominal_flops_per_second


@pytest.fixture
def record() -> Callable[..., StepMeasurements]:
    """Records steps with such figures in one object."""
    clocks = StepClocks()
    measurements = StepMeasurements(clocks, None, further_bytes=50)

    def take(step: int, figures: list[float]) -> StepMeasurements:
        clocks.figures = tf.constant(figures, tf.float64)
        measurements.record_step(step, 0.5, measurements.measure())
        return measurements

    return take


def test_the_steps_of_the_rate_are_summed_and_the_first_one_is_not(record: Callable[..., StepMeasurements]) -> None:
    for step, compiling in enumerate((10.0, 0.0, 0.0)):
        times = [0.1 + compiling, 0.2 + compiling, 0.3, 0.4 + compiling, 1.0 + compiling]
        measurements = record(step, [100.0 * (step + 1), 1.0, 0.0, *times])
    # The sums of batch norm count as payload, 50 bytes a step.
    assert (measurements.steps_done, measurements.payload_bytes) == (3, 600.0 + 3 * 50)
    measured = measurements.take(EpochResult(0.5, 8.0, 0.25, measured_steps=2, measured_seconds=4.0))
    assert 2 * measured == pytest.approx(np.array([[4.0, 1.0, 0.2, 0.4, 0.6, 0.8, 2.0]]))
    assert divide(measured).seconds[0]["compute"] == pytest.approx((4.0 - 1.0 - 2.0) / 2)

    record(3, [1.0] * 8)
    alone = measurements.take(EpochResult(0.5, 8.0, 0.0, measured_steps=1, measured_seconds=1.0))
    payload = measurements.payload_bytes
    nothing_left = measurements.take(EpochResult(0.5, 0.0, 0.0, measured_steps=0, measured_seconds=1e-9))
    assert (alone[0, 2], payload, nothing_left[0, 2]) == (1.0, 0.0, 0.0)


def test_steps_that_an_in_memory_checkpoint_has_are_forgotten(record: Callable[..., StepMeasurements]) -> None:
    for step, payload in enumerate((100.0, 200.0, 900.0)):
        measurements = record(step, [payload] * 8)
    measurements.go_on_after(2)
    assert (measurements.steps_done, record(2, [300.0] * 8).payload_bytes) == (2, 300.0 + 50)


def test_every_rank_gets_what_each_one_has(one_rank: Any) -> None:
    value = {"host": "näme", "cores": 2}
    two: Any = SimpleNamespace(concatenate=lambda values: np.concatenate([values, values]))
    for ranks, copies in ((one_rank, 1), (two, 2)):
        assert gather_json(value, ranks) == [value] * copies


def test_a_matrix_product_is_measured() -> None:
    assert matmul_flops_per_second("float32") > 1e8


AMD, XEON = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\n", "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) {}\n"
AVX512, THREADS = "avx avx2 avx512f avx512_bf16", "siblings\t: 16\ncpu cores\t: 8\n"


@pytest.mark.parametrize(
    ("lines", "flags", "precision", "cores", "per_cycle"),
    [
        ("", "sse avx avx2 avx512f", "float32", 4, 4 * 64),
        ("", "sse avx avx2", "float32", 4, 4 * 32),
        ("", "sse", "float32", 4, None),
        ("", "avx512f avx512_bf16 amx_bf16", "bfloat16", 4, 4 * 2048),
        ("", "avx512f", "bfloat16", 4, None),
        ("", "avx512f", "float16", 4, None),
        # Hyperthreads share a core.
        (THREADS, "avx avx2", "float32", 4, 2 * 32),
        (THREADS, "avx avx2", "float32", 1, 32),
        # Some cores compute AVX-512 at half the rate.
        (AMD.format(25), AVX512, "float32", 4, 4 * 32),  # Zen 4
        (AMD.format(25), AVX512, "bfloat16", 4, 4 * 64),
        (AMD.format(26), AVX512, "float32", 4, 4 * 64),  # Zen 5
        *(
            (XEON.format(name), AVX512, "float32", 4, 4 * width)
            for name, width in (
                ("Xeon(R) Platinum 8175M CPU @ 2.50GHz", 64),
                ("Xeon(R) Silver 4114 CPU @ 2.20GHz", 32),
                ("Xeon(R) Silver 4314 CPU @ 2.40GHz", 64),
                ("Xeon(R) Gold 5120 CPU @ 2.20GHz", 32),
                ("Xeon(R) Gold 5122 CPU @ 3.60GHz", 64),
                ("Core(TM) i7-1165G7 @ 2.80GHz", 32),
                ("Core(TM) i9-7980XE CPU @ 2.60GHz", 64),
            )
        ),
    ],
)
def test_the_nominal_peak_is_cores_times_clock_times_width(
    lines: str, flags: str, precision: str, cores: int, per_cycle: int | None
) -> None:
    text = f"processor\t: 0\n{lines}cpu MHz\t\t: 2500.000\nflags\t\t: {flags}\n"
    values = dict(line.split(": ", 1) for line in text.replace("\t", "").splitlines())
    assert nominal_flops_per_second(precision, cores=cores, values=values) == (
        None if per_cycle is None else 2.5e9 * per_cycle
    )
    assert nominal_flops_per_second(precision, cores=cores, values={}) is None


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "float32", 156.0),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A10", "float32", 62.5),
        ("NVIDIA A10G", "float32", 35.0),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "float32", 494.7),
        ("NVIDIA L40S", "float16", 362.0),
        ("NVIDIA L4", "float16", 121.0),
        ("Tesla V100-PCIE-16GB", "float16", 112.0),
        ("Tesla V100-SXM2-16GB", "float16", 125.0),
        ("Tesla T4", "float32", 8.1),
        ("NVIDIA T400", "float32", None),
        ("NVIDIA RTX A1000", "float32", None),
        ("NVIDIA RTX A4000", "float32", None),
        ("", "float32", None),
    ],
)
def test_the_nominal_peak_of_a_gpu_is_that_of_its_data_sheet(
    name: str, precision: str, teraflops: float | None
) -> None:
    assert flops_per_second_of_gpu(name, precision) == (teraflops and pytest.approx(teraflops * 1e12))
