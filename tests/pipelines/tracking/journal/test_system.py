import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipelines.tracking.journal import system
from pipelines.tracking.journal.system import SystemSampler, curves_of
from pipelines.tracking.journal.writer import Point
from pipelines.tracking.metrics import unlisted
from tests.patience import patient


def test_what_mlflow_samples_is_taken_with_the_step() -> None:
    sampler, deadline, samples = SystemSampler(0.05, lambda: 7), time.monotonic() + patient(60), []
    while len(samples) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        samples += sampler.take()
    sampler.close()
    step, milliseconds, values = samples[0]
    assert step == 7
    assert abs(milliseconds / 1000 - time.time()) < 120
    assert {"cpu_utilization_percentage", "disk_usage_percentage", "network_receive_megabytes"} <= values.keys()


def test_a_gpu_that_is_not_sampled_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system, "GPUMonitor", Mock(side_effect=ImportError("`nvidia-ml-py` is not installed")))
    monkeypatch.setattr(system, "DEVICES", tmp_path)
    SystemSampler(60.0, lambda: 0).close()
    assert "GPU" not in caplog.text
    (tmp_path / "nvidia0").touch()
    SystemSampler(60.0, lambda: 0).close()
    assert "this machine's GPUs are not sampled: `nvidia-ml-py` is not installed" in caplog.text


def test_each_rank_has_curves_of_its_own() -> None:
    curves = curves_of([[(1, 10, {"cpu": 50.0}), (2, 20, {"cpu": 60.0})], [(2, 21, {"cpu": 70.0})]])
    assert curves == {
        "system/rank-0/cpu": [Point(1, 50.0, 10), Point(2, 60.0, 20)],
        "system/rank-1/cpu": [Point(2, 70.0, 21)],
    }
    assert unlisted(curves) == []
