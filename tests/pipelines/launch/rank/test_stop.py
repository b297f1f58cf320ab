"""A request to stop, from a signal to the driver or to a task, gives ranks the time to save their state."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.launch.driver.failure import RankLostError
from pipelines.launch.driver.termination import Termination
from pipelines.launch.policy import Attempt
from pipelines.launch.rank.report import StoppedOnRequest, attempt, report, stop_requested
from pipelines.launch.runner import BarrierRunner
from tests.patience import patient, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]

DRIVER = """
import os, sys, time
from pathlib import Path
from pipelines.launch.runner import BarrierRunner

def work(folder):
    from pipelines.launch.rank.report import StoppedOnRequest, stop_requested
    rank = os.environ["HOROVOD_RANK"]
    Path(folder, f"begun-{rank}").touch()
    while not stop_requested():
        time.sleep(0.01)
    Path(folder, f"saved-{rank}").touch()
    raise StoppedOnRequest("saved")

BarrierRunner(None, 2, retries=3, retry_wait=0).run(work, sys.argv[1])
"""


def test_sigterm_takes_effect_on_the_driver_when_the_ranks_have_saved(tmp_path: Path, project: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(project)},
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2 or driver.poll() is not None)
        driver.terminate()
        _, errors = driver.communicate(timeout=patient(100))
    finally:
        driver.kill()
        driver.wait()
    assert (driver.returncode, {path.name for path in tmp_path.iterdir()}) == (
        -signal.SIGTERM,
        {"begun-0", "begun-1", "saved-0", "saved-1"},
    )
    assert b"the driver received SIGTERM: all ranks are asked to stop within 60 s" in errors
    assert b"Traceback" not in errors


def test_sigterm_of_one_task_stops_all_ranks_and_is_tried_again(spark: SparkSession) -> None:
    attempts: list[Attempt] = []

    def function() -> int:
        if attempt() == 1:
            if os.environ["HOROVOD_RANK"] == "1":
                os.kill(os.getppid(), signal.SIGTERM)  # the process of Spark's task
            wait_until(stop_requested)
            raise StoppedOnRequest("step 7 is saved")
        return attempt()

    runner = BarrierRunner(spark, 2, retries=1, retry_wait=0, on_attempt=attempts.append, log_to_driver="none")
    assert runner.run_all(function) == [2, 2]
    assert "stopped on request: step 7 is saved" in attempts[1].after


def test_a_rank_that_does_not_listen_is_killed_after_the_grace(spark: SparkSession) -> None:
    def function() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(patient(300))  # longer than this test may take

    with pytest.raises(RankLostError, match=r"still ran 1 s after it was asked to stop \(the task of rank 1 on "):
        BarrierRunner(spark, 2, stop_grace=1, log_to_driver="none").run(function)


def test_outside_a_rank_nobody_asks() -> None:
    assert not stop_requested()


def test_sigterm_is_told_to_an_attempt_though_it_came_before_and_a_second_one_takes_effect_at_once() -> None:
    reasons, termination = [], Termination()
    termination.handle(signal.SIGTERM, None)
    assert termination.received
    termination.tell(reasons.append)
    assert reasons == ["the driver received SIGTERM"]
    with pytest.raises(KeyboardInterrupt, match="SIGTERM came twice"):
        termination.handle(signal.SIGTERM, None)


@pytest.mark.long
def test_a_rank_that_stops_at_once_leaves_the_others_the_grace(spark: SparkSession, tmp_path: Path) -> None:
    """Spark ends the stage with the first task that fails."""

    def function() -> None:
        report()
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)
        wait_until(stop_requested)
        if os.environ["HOROVOD_RANK"] == "0":
            time.sleep(25)  # longer than a task waits for the driver's last word otherwise
            (tmp_path / "saved").touch()
        raise StoppedOnRequest("saved")

    with pytest.raises(RankLostError, match="stopped on request: saved") as caught:
        BarrierRunner(spark, 2, log_to_driver="none").run(function)
    assert ([outcome.kind for outcome in caught.value.outcomes], (tmp_path / "saved").exists()) == (
        ["requested", "requested"],
        True,
    )
