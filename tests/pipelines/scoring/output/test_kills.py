"""Scoring whose driver and executors are killed at random moments: every sample is predicted exactly once."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]

JOB = """
import os, sys
from pyspark.sql import SparkSession
from jobs.shell import cli

master, *line = sys.argv[1:]
builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
code = cli.execute(["score", *line])
sys.stdout.flush()
os._exit(code)
"""


def notes(output: Path) -> int:
    return len(list((output / "_progress").glob("*.parquet.json")))


def wait_for_notes(process: subprocess.Popen[bytes], output: Path, count: int) -> bool:
    """Wait until so many parts are finished; False where the job has ended before."""
    while notes(output) < count:
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def executors(driver: int) -> list[psutil.Process]:
    """The JVMs of a local cluster's executors."""
    found = []
    for process in psutil.Process(driver).children(recursive=True):
        with suppress(psutil.Error):
            if any("CoarseGrainedExecutorBackend" in part for part in process.cmdline()):
                found.append(process)
    return found


def test_killed_drivers_and_executors_leave_each_sample_once(
    logged: Any,
    expected: Any,
    small_archive: Path,
    tmp_path: Path,
    predictions_of: Any,
    check_predictions: Any,
) -> None:
    random = np.random.default_rng(0)
    output, log = tmp_path / "predictions", tmp_path / "log"
    (tmp_path / "job.py").write_text(JOB)
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MLFLOW_TRACKING_URI": logged.store,
    }
    line = ["--model", logged.uri, "--input", str(small_archive), "--output", str(output)]
    for setting in ("archive=bigearthnet_v2", "score.samples_per_file=2", "score.batch_size=2"):
        line += ["--set", setting]

    def start(master: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, tmp_path / "job.py", master, *line]
        with log.open("ab") as file:
            return subprocess.Popen(
                command, env=environment, cwd=tmp_path, stdout=file, stderr=file, start_new_session=True
            )

    for _ in range(2):
        process = start("local[2]")
        in_time = wait_for_notes(process, output, notes(output) + int(random.integers(1, 5)))
        time.sleep(float(random.uniform(0, 0.05)))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert in_time, log.read_text()[-4000:]
    assert not (output / "predictions.json").exists()

    process = start("local-cluster[2,1,1024]")
    # Python workers of the killed job may have finished their parts meanwhile, as those of a lost cluster would.
    while len(running := executors(process.pid)) < 2:
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(0.05)
    assert wait_for_notes(process, output, notes(output) + int(random.integers(1, 3))), log.read_text()[-4000:]
    running[int(random.integers(0, 2))].kill()
    assert process.wait(patient(300)) == 0, log.read_text()[-4000:]

    check_predictions(predictions_of(output), expected)
