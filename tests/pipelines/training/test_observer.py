import numpy as np
import pytest
import tensorflow as tf

from pipelines.training.gathering import gather_json
from pipelines.training.gpu_peaks import flops_per_second_of_gpu
from pipelines.training.loop import EpochResult
from pipelines.training.observer import StepMeasurements, gather_phases
from pipelines.training.peak import matmul_flops_per_second, nominal_flops_per_second
from pipelines.training.step import StepClocks


class Alone:
    size = 1

    def concatenate(self, values: np.ndarray) -> np.ndarray:
        return values


class TwoRanks:
    """Gives this rank's values for both ranks."""

    def concatenate(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, values])


def test_the_steps_of_the_rate_are_summed_and_the_first_one_is_not() -> None:
    clocks = StepClocks()
    measurements = StepMeasurements(clocks, None)
    for step in range(3):
        compiling = 10.0 if step == 0 else 0.0
        of_exchange = [100.0 * (step + 1), 1.0, 0.0, 0.1 + compiling, 0.2 + compiling, 0.3]
        clocks.figures = tf.constant([*of_exchange, 0.4 + compiling, 1.0 + compiling], tf.float64)
        measurements.record_step(step, 0.5, measurements.measure())
    assert measurements.steps_done == 3
    assert measurements.payload_bytes == 600.0
    measured = measurements.take(EpochResult(0.5, 8.0, 0.25, measured_steps=2, measured_seconds=4.0))
    assert (measured.steps, measured.seconds, measured.input) == (2, 4.0, 1.0)
    sums = [measured.encode, measured.collective, measured.decode, measured.optimizer, measured.after_gradients]
    assert sums == pytest.approx([0.2, 0.4, 0.6, 0.8, 2.0])
    phases = gather_phases(measured, Alone())
    assert phases.seconds[0]["compute"] == pytest.approx((4.0 - 1.0 - 2.0) / 2)

    clocks.figures = tf.constant([1.0] * 8, tf.float64)
    measurements.record_step(3, 0.5, measurements.measure())
    assert measurements.take(EpochResult(0.5, 8.0, 0.0, measured_steps=1, measured_seconds=1.0)).encode == 1.0

    assert measurements.payload_bytes == 0.0
    nothing_left = measurements.take(EpochResult(0.5, 0.0, 0.0, measured_steps=0, measured_seconds=1e-9))
    assert (nothing_left.steps, nothing_left.encode) == (0, 0.0)


def test_steps_that_a_kept_state_tells_of_are_forgotten() -> None:
    clocks = StepClocks()
    measurements = StepMeasurements(clocks, None)
    for step, payload in enumerate((100.0, 200.0, 900.0)):
        clocks.figures = tf.constant([payload] * 8, tf.float64)
        measurements.record_step(step, 0.5, measurements.measure())
    measurements.go_on_after(2)
    assert measurements.steps_done == 2
    clocks.figures = tf.constant([300.0] * 8, tf.float64)
    measurements.record_step(2, 0.5, measurements.measure())
    assert measurements.payload_bytes == 300.0


def test_the_sums_of_batch_norm_count_as_payload() -> None:
    clocks = StepClocks()
    measurements = StepMeasurements(clocks, None, further_bytes=50)
    clocks.figures = tf.constant([100.0] * 8, tf.float64)
    measurements.record_step(0, 0.5, measurements.measure())
    assert measurements.payload_bytes == 150.0


def test_every_rank_gets_what_each_one_has() -> None:
    value = {"host": "näme", "cores": 2}
    assert gather_json(value, Alone()) == [value]
    assert gather_json(value, TwoRanks()) == [value, value]


def test_a_matrix_product_is_measured() -> None:
    assert matmul_flops_per_second("float32") > 1e8


@pytest.mark.parametrize(
    ("precision", "flags", "expected"),
    [
        ("float32", "sse avx avx2 avx512f", 4 * 2.5e9 * 64),
        ("float32", "sse avx avx2", 4 * 2.5e9 * 32),
        ("float32", "sse", None),
        ("bfloat16", "avx512f avx512_bf16 amx_bf16", 4 * 2.5e9 * 2048),
        ("bfloat16", "avx512f", None),
        ("float16", "avx512f", None),
    ],
)
def test_the_nominal_peak_is_cores_times_clock_times_width(precision: str, flags: str, expected: float | None) -> None:
    cpuinfo = f"processor\t: 0\nmodel name\t: a processor\ncpu MHz\t\t: 2500.000\nflags\t\t: {flags}\n"
    assert nominal_flops_per_second(precision, cores=4, cpuinfo=cpuinfo) == expected
    assert nominal_flops_per_second(precision, cores=4, cpuinfo="") is None


AMD, XEON = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\n", "vendor_id\t: GenuineIntel\nmodel name\t: Intel(R) {}\n"


@pytest.mark.parametrize(
    ("lines", "precision", "per_cycle"),
    [
        (AMD.format(25), "float32", 32),  # Zen 4
        (AMD.format(25), "bfloat16", 64),
        (AMD.format(26), "float32", 64),  # Zen 5
        (XEON.format("Xeon(R) Platinum 8175M CPU @ 2.50GHz"), "float32", 64),
        (XEON.format("Xeon(R) Silver 4114 CPU @ 2.20GHz"), "float32", 32),
        (XEON.format("Xeon(R) Silver 4314 CPU @ 2.40GHz"), "float32", 64),
        (XEON.format("Xeon(R) Gold 5120 CPU @ 2.20GHz"), "float32", 32),
        (XEON.format("Xeon(R) Gold 5122 CPU @ 3.60GHz"), "float32", 64),
        (XEON.format("Core(TM) i7-1165G7 @ 2.80GHz"), "float32", 32),
        (XEON.format("Core(TM) i9-7980XE CPU @ 2.60GHz"), "float32", 64),
    ],
)
def test_some_cores_compute_avx_512_at_half_the_rate(lines: str, precision: str, per_cycle: int) -> None:
    cpuinfo = f"{lines}cpu MHz\t\t: 2500.000\nflags\t\t: avx avx2 avx512f avx512_bf16\n"
    assert nominal_flops_per_second(precision, cores=4, cpuinfo=cpuinfo) == 4 * 2.5e9 * per_cycle


def test_hyperthreads_share_a_core() -> None:
    cpuinfo = "cpu MHz\t\t: 2500.000\nsiblings\t: 16\ncpu cores\t: 8\nflags\t\t: avx avx2\n"
    assert nominal_flops_per_second("float32", cores=4, cpuinfo=cpuinfo) == 2 * 2.5e9 * 32
    assert nominal_flops_per_second("float32", cores=1, cpuinfo=cpuinfo) == 2.5e9 * 32


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
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert flops_per_second_of_gpu(name, precision) == expected
