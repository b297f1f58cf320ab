"""An executor is taken away and none comes for it: training goes on with the largest number that divides the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(500)]


def training_that_waits_in_its_second_epoch(config: Any, run: Any, checkpoints: Any) -> Any:
    """`entry.train`, but in the first attempt rank 1 says when it is there and goes no further."""
    import os
    import time

    from pipelines.launch.rank.report import attempt, report
    from pipelines.training import epochs, worker
    from pipelines.training.checkpoint.files import list_checkpoints

    if attempt() == 1 and os.environ["HOROVOD_RANK"] == "1":
        epoch_batches = epochs.train_epoch  # type: ignore[attr-defined]

        def waiting(*args: Any, **settings: Any) -> Any:
            if settings["first_step"] > 0:
                while not list_checkpoints(checkpoints):  # rank 0 may still be writing that of the first epoch
                    time.sleep(0.05)
                report(event="waits")
                time.sleep(600)
            return epoch_batches(*args, **settings)

        epochs.train_epoch = waiting  # type: ignore[attr-defined]
    return worker.train_worker(config, run, checkpoints)


def train_while_an_executor_goes(dataset: str, output: str, network: str) -> tuple[str, str, int]:
    """The run, its folder and the number of its epochs."""
    from pyspark.sql import SparkSession

    from conf.load import load
    from jobs import train as train_job
    from jobs.shell import ranks
    from pipelines.launch.driver import preflight
    from pipelines.training import entry

    event_of = ranks.event_of  # type: ignore[attr-defined]

    def take(fields):  # type: ignore[no-untyped-def]
        if fields["event"] == "waits":
            preflight.REGISTRATION_SECONDS = 2.0  # the executor will not come back
            spark.sparkContext._jsc.sc().killExecutor("1")
        return event_of(fields)

    ranks.event_of = take  # type: ignore[attr-defined]
    entry.train = training_that_waits_in_its_second_epoch
    # Nine samples a step: three ranks share them, and one can; the two that are left cannot.
    settings = [
        network,
        "launch.num_workers=3",
        "training.batch_size_per_worker=3",
        "launch.retries=1",
        "launch.allow_fewer_workers=true",
        "launch.recover=in_place",
        f"dataset.path={dataset}",
        f"training.output={output}",
    ]
    spark = SparkSession.builder.master("local-cluster[3,1,1024]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        trained = train_job.train(load("smoke", settings))
        return trained.run.run_id, str(trained.folder), len(trained.summary.history)
    finally:
        spark.stop()


def test_training_goes_on_where_the_global_batch_can_be_shared(
    in_fresh_process: Callable[..., Any], small_dataset: Path, small_network: str, tmp_path: Path, mlflow_store: str
) -> None:
    arguments = (str(small_dataset), str(tmp_path / "out"), small_network)
    run_id, folder, epochs = in_fresh_process(train_while_an_executor_goes, *arguments)
    tags = MlflowClient(mlflow_store).get_run(run_id).data.tags
    assert tags["attempt"] == "2"
    assert "lost: " in tags["attempt_2_after"]
    assert (tags["attempt_1_workers"], tags["attempt_2_workers"], tags["workers"]) == ("3", "1", "1")
    assert tags["changed.launch.num_workers"] == "1 from step 3"
    workers = MlflowClient(mlflow_store).get_metric_history(run_id, "time/workers")
    assert [(point.step, point.value) for point in workers] == [(3, 3), (6, 1)]
    first, second = Path(folder, "logs", "rank-0.log").read_text().split("--- attempt 2, after: ")
    assert "rank 0 of 3: 32 training samples, 3 steps per epoch" in first
    assert "rank 0 of 1: 32 training samples, 3 steps per epoch" in second
    assert ("continuing from" in second, "step-00000003.npz: epoch 2, step 3" in second) == (True, True), second
    assert epochs == 2
