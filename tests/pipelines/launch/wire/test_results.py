"""Return values of every size, and messages that are too large."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark import RDD
from pyspark.sql import SparkSession

from pipelines.launch.driver import barrier_tasks
from pipelines.launch.rank import rank_main
from pipelines.launch.rank.report import log_to_driver, report
from pipelines.launch.runner import BarrierRunner, InfrastructureError, WorkerError
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(240)]

MIB = 1 << 20


def block(mib: int) -> bytes:
    return os.environ["HOROVOD_RANK"].encode() * (mib * MIB)


@pytest.mark.long
def test_large_values_do_not_pass_through_the_jvm(spark: SparkSession) -> None:
    """Not through one that accepts 2 MiB of results, as one with a small heap accepts little."""
    conf = spark.sparkContext._jsc.sc().conf()
    before = conf.get("spark.driver.maxResultSize", "1g")
    conf.set("spark.driver.maxResultSize", "2m")
    try:
        assert BarrierRunner(spark, 2).run(block, 20) == b"0" * (20 * MIB)
        assert BarrierRunner(spark, 2).run_all(block, 3) == [b"0" * (3 * MIB), b"1" * (3 * MIB)]
    finally:
        conf.set("spark.driver.maxResultSize", before)


def test_only_rank_zeros_value_is_asked_for_and_one_that_cannot_be_pickled_is_named() -> None:
    def function() -> object:
        return "fine" if os.environ["HOROVOD_RANK"] == "0" else {"model": threading.Lock()}

    assert BarrierRunner(None, 2).run(function) == "fine"
    with pytest.raises(
        WorkerError,
        match=r"rank 1 on 127\.0\.0\.1 failed: TypeError: the return value of the function, of type dict, cannot be "
        r"pickled: .*lock",
    ):
        BarrierRunner(None, 2).run_all(function)


def test_a_report_above_the_limit_is_refused_and_all_that_follows_arrives() -> None:
    reports, shown = [], []

    def function() -> str:
        refused = ""
        report(text="x" * (4 * MIB - 100))
        for send in (lambda text: report(text=text), log_to_driver):
            try:
                send("x" * (5 * MIB))
            except ValueError as error:
                refused = str(error)
            report(refused=refused)
        log_to_driver("said after it")
        for number in range(5000):
            report(number=number)
        return refused

    refused = BarrierRunner(None, 1, on_report=reports.append, on_log=lambda rank, line: shown.append(line)).run(
        function
    )
    assert ("a message of 5,242," in refused, "does not fit the 4,194,304 bytes" in refused) == (True, True), refused
    assert "write it to storage" in refused
    assert [sorted(report) for report in reports[:3]] == [["rank", "text"], ["rank", "refused"], ["rank", "refused"]]
    assert all("does not fit" in report["refused"] for report in reports[1:3])
    assert ([report["number"] for report in reports[3:]], shown) == (list(range(5000)), ["said after it"])


def test_a_stage_that_spark_does_not_end_is_an_error(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a JVM without memory is: the ranks have finished, and `collect` never returns."""
    released, collect = threading.Event(), RDD.collect

    def never_returns(rdd: RDD[Any]) -> list[Any]:
        results = collect(rdd)
        released.wait(patient(100))
        return results

    monkeypatch.setattr(barrier_tasks, "RESULT_SECONDS", 0.5)
    monkeypatch.setattr(barrier_tasks, "CANCEL_SECONDS", 0.5)
    monkeypatch.setattr(RDD, "collect", never_returns)
    try:
        with pytest.raises(InfrastructureError, match="all ranks have finished, but Spark has not ended their stage"):
            BarrierRunner(spark, 1).run(len, "")
    finally:
        released.set()


def test_a_disk_that_is_full_is_named_by_the_folder_of_the_file() -> None:
    with (
        Path("/dev/full").open("wb") as full,
        pytest.raises(OSError, match="function cannot be written to /dev: No space"),
    ):
        rank_main._write_result(bytes(1 << 20), full.fileno())
