"""Executors in processes of their own, which prove themselves to Spark, and which Spark takes back one by one."""

import os
import re
import secrets
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pyspark.sql import SparkSession

from pipelines.launch.driver import preflight
from pipelines.launch.rank.report import attempt, report
from pipelines.launch.runner import BarrierRunner, InfrastructureError
from tests.patience import patient, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(180)]


def run_and_lose_executors() -> SimpleNamespace:
    """What became of runs on three executors, on a session that authenticates."""
    settings = {
        "spark.ui.enabled": "false",
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(16),
    }
    spark = SparkSession.builder.master("local-cluster[3,1,1024]").config(map=dict(settings)).getOrCreate()

    def work() -> str:
        # The executor's number is on the command line of the JVM that this process descends from.
        process = psutil.Process().parent()
        while "--executor-id" not in (words := process.cmdline()):
            process = process.parent()
        if attempt() == 1:
            report(executor=words[words.index("--executor-id") + 1])
            time.sleep(patient(600))
        return f"{os.environ['HOROVOD_RANK']} of {os.environ['HOROVOD_SIZE']}"

    def lose_the_last_ranks_executor(ranks: int, allowed_sizes: list[int]) -> tuple[list[str], list[str]]:
        errors: list[str] = []

        def take_back(message: dict[str, Any]) -> None:
            if message["rank"] == ranks - 1:
                spark.sparkContext._jsc.sc().killExecutor(message["executor"])

        runner = BarrierRunner(
            spark,
            ranks,
            accept_unencrypted=True,
            retries=1,
            retry_wait=0.1,
            # As long it waits for executors in place of the lost ones, of which none comes here.
            start_timeout=patient(15),
            allowed_sizes=allowed_sizes,
            on_report=take_back,
            on_attempt=lambda attempt: errors.append(attempt.after),
        )
        try:
            return runner.run_all(work), errors[1:]
        except InfrastructureError as error:
            return [], [str(error)]

    with spark:
        replaced = drop_an_executor_that_does_not_answer(spark)
        pids = BarrierRunner(spark, 3, accept_unencrypted=True).run_all(os.getpid)
        preflight.REGISTRATION_SECONDS = 2.0  # executors that were taken back will not return
        return SimpleNamespace(
            replaced=replaced,
            pids=pids,
            fewer=lose_the_last_ranks_executor(3, [1, 2]),
            spare=lose_the_last_ranks_executor(1, []),
            none_left=lose_the_last_ranks_executor(1, []),
        )


def drop_an_executor_that_does_not_answer(spark: SparkSession) -> tuple[int, list[str]]:
    """Slots that there are in the end, and the numbers of their executors."""

    def ports() -> dict[str, str]:
        found = spark.sparkContext._jsc.sc().statusStore().executorList(True)
        each = [found.apply(number) for number in range(found.size())]
        return {one.id(): one.hostPort().rpartition(":")[2] for one in each if one.id() != "driver"}

    assert preflight.count_slots(spark, 3) == 3
    wait_until(lambda: all(port.isdigit() for port in ports().values()))  # they have one a moment after their slots
    silent, answers = ports()["0"], preflight.answers
    preflight.answers = lambda host, port: str(port) != silent
    preflight.drop_lost_executors(spark)
    preflight.answers = answers
    wait_until(lambda: sorted(ports()) == ["1", "2", "3"])
    return preflight.count_slots(spark, 3), sorted(ports())


@pytest.fixture(scope="module")
def ended(in_fresh_process: Callable[..., Any]) -> SimpleNamespace:
    return in_fresh_process(run_and_lose_executors)


def test_an_executor_that_does_not_answer_is_replaced_and_with_authentication_accepted_the_job_runs(
    ended: SimpleNamespace,
) -> None:
    assert ended.replaced == (3, ["1", "2", "3"])
    assert len(set(ended.pids)) == 3


@pytest.mark.parametrize(
    ("run", "values", "lost"),
    [
        ("fewer", ["0 of 2", "1 of 2"], 2),
        ("spare", ["0 of 1"], 0),  # Spark would start the stage there by itself, beside the further attempt
        ("none_left", [], 0),
    ],
)
def test_a_run_goes_on_with_what_fits_and_otherwise_the_first_error_is_the_last(
    ended: SimpleNamespace, run: str, values: list[str], lost: int
) -> None:
    assert getattr(ended, run)[0] == values
    (error,) = getattr(ended, run)[1]
    assert re.search(rf"rank {lost} on .* failed: lost: ", error)
