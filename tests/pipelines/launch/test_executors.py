"""Executors in processes of their own, which prove themselves to Spark, and which Spark takes back one by one."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Ended:
    """What became of runs on three executors, on a session that authenticates."""

    refused: str
    pids: list[int]
    fewer: tuple[list[str], list[str]]
    """Three ranks, one or two are allowed too: what the ranks returned, and the error of the first attempt."""
    spare: tuple[list[str], list[str]]
    """One rank on one of two executors."""
    none_left: tuple[list[str], list[str]]
    """One rank on the last one."""


def run_and_lose_executors() -> tuple[Any, ...]:
    """The fields of `Ended`."""
    from pyspark.sql import SparkSession

    from pipelines.launch import preflight
    from pipelines.launch.runner import BarrierRunner, InfrastructureError

    settings = {
        "spark.ui.enabled": "false",
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_hex(16),
    }
    spark = SparkSession.builder.master("local-cluster[3,1,1024]").config(map=dict(settings)).getOrCreate()

    def work() -> str:
        import time

        from pipelines.launch.report import attempt, report

        # The executor's number is on the command line of the JVM that this process descends from.
        pid = os.getppid()
        while b"CoarseGrainedExecutorBackend" not in (words := Path(f"/proc/{pid}/cmdline").read_bytes()):
            pid = int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])
        if attempt() == 1:
            report(executor=words.split(b"\0--executor-id\0")[1].split(b"\0")[0].decode())
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
            start_timeout=patient(30),
            allowed_sizes=allowed_sizes,
            on_report=take_back,
            on_attempt=lambda attempt: errors.append(attempt.after),
        )
        try:
            return runner.run_all(work), errors[1:]
        except InfrastructureError as error:
            return [], [str(error)]

    try:
        try:
            refused = str(BarrierRunner(spark, 3).run(os.getpid))
        except RuntimeError as error:
            refused = str(error)
        pids = BarrierRunner(spark, 3, accept_unencrypted=True).run_all(os.getpid)
        preflight._REGISTRATION_SECONDS = 2.0  # executors that were taken back will not return
        fewer = lose_the_last_ranks_executor(3, [1, 2])
        spare = lose_the_last_ranks_executor(1, [])
        return refused, pids, fewer, spare, lose_the_last_ranks_executor(1, [])
    finally:
        spark.stop()


@pytest.fixture(scope="module")
def ended(in_fresh_process: Callable[..., Any]) -> Ended:
    return Ended(*in_fresh_process(run_and_lose_executors))


def test_authentication_that_does_not_reach_the_ranks_must_be_accepted(ended: Ended) -> None:
    assert ended.refused.startswith("spark.authenticate=true covers who may join Spark's own traffic")
    assert "the ranks' own traffic is not covered: gradients and Horovod's rendezvous go in the clear" in ended.refused
    assert "accept_unencrypted=True" in ended.refused


def test_with_authentication_accepted_the_job_runs(ended: Ended) -> None:
    assert len(set(ended.pids)) == 3


def test_a_run_goes_on_with_the_largest_allowed_number_that_fits(ended: Ended) -> None:
    values, (error,) = ended.fewer
    assert values == ["0 of 2", "1 of 2"]
    assert "rank 2 on " in error
    assert " failed: lost: " in error


def test_a_run_goes_on_with_an_executor_that_was_idle(ended: Ended) -> None:
    """Spark would start the stage there by itself, beside the launcher's own further attempt."""
    values, (error,) = ended.spare
    assert values == ["0 of 1"]
    assert " failed: lost: " in error


def test_where_too_few_are_left_the_first_error_is_the_last(ended: Ended) -> None:
    values, (error,) = ended.none_left
    assert values == []
    assert " failed: lost: " in error


def drop_an_executor_that_does_not_answer() -> tuple[int, list[str]]:
    """Slots that there are in the end, and the numbers of their executors."""
    import time

    from pyspark.sql import SparkSession

    from pipelines.launch import preflight

    spark = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false").getOrCreate()
    try:

        def ports() -> dict[str, str]:
            found = spark.sparkContext._jsc.sc().statusStore().executorList(True)
            each = [found.apply(number) for number in range(found.size())]
            return {one.id(): one.hostPort().rpartition(":")[2] for one in each if one.id() != "driver"}

        assert preflight.count_slots(spark, 2) == 2
        while not all(port.isdigit() for port in ports().values()):  # they have one a moment after their slots
            time.sleep(0.05)
        silent = ports()["0"]
        preflight.answers = lambda host, port: str(port) != silent  # type: ignore[assignment]
        preflight.drop_lost_executors(spark)
        deadline = time.monotonic() + patient(60)
        while sorted(ports()) != ["1", "2"] and time.monotonic() < deadline:
            time.sleep(0.2)
        return preflight.count_slots(spark, 2), sorted(ports())
    finally:
        spark.stop()


def test_an_executor_that_does_not_answer_is_replaced(in_fresh_process: Callable[..., Any]) -> None:
    assert in_fresh_process(drop_an_executor_that_does_not_answer) == (2, ["1", "2"])
