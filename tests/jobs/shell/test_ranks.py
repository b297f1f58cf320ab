"""What the configuration's launch section does to the ranks of a job."""

import os
import signal
import time
from dataclasses import replace

import pytest
from pyspark.sql import SparkSession

from conf.load import load
from jobs import train
from jobs.shell.ranks import barrier_runner, check_slots
from pipelines.launch.driver.failure import RankLostError
from pipelines.training.ranks.events import EpochTrained, SavingModel
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


@pytest.mark.long
@pytest.mark.usefixtures("new_interpreters")
def test_the_time_for_a_last_checkpoint_is_configured(spark: SparkSession, mlflow_store: str) -> None:
    def stops_too_late() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)  # the process of Spark's task
        time.sleep(patient(300))  # longer than this test may take

    launch = load("smoke", ["launch.stop_grace_seconds=1.5"]).launch
    runner = barrier_runner(spark, launch, description="tests", log_to_driver="none")
    with pytest.raises(RankLostError, match=r"still ran 1\.5 s after it was asked to stop"):
        runner.run(stops_too_late)


def test_gpus_of_executors_that_the_workers_do_not_use_are_named(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_slots(spark, load("smoke").launch)
    assert capsys.readouterr().out == ""
    conf = spark.sparkContext.getConf().set("spark.executor.resource.gpu.amount", "1")
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: conf)
    check_slots(spark, load("smoke").launch)
    assert "spark.executor.resource.gpu.amount=1 reserves GPUs for each executor" in capsys.readouterr().out


def test_fewer_workers_leave_some_for_a_step_to_wait_for() -> None:
    def sizes(backups: int) -> list[int]:
        mode = f"training.mode={{name: parameter_server, synchrony: backup, backup_workers: {backups}}}"
        return load("smoke", ["launch.num_workers=4", "training.batch_size_per_worker=3", mode]).smaller_sizes

    assert (sizes(0), sizes(1), sizes(2), sizes(3)) == ([1, 2], [2], [], [])


def test_a_run_asks_for_more_workers_only_where_an_epoch_is_left() -> None:
    first = EpochTrained(epoch=1, epochs=3, metrics={"train/loss": 0.5}, where="", is_last=False)
    ended = replace(first, epoch=2, is_last=True)  # as patience has decided
    assert [train.may_grow(event) for event in (first, ended, SavingModel())] == [True, False, False]
