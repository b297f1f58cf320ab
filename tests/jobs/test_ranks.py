"""What the configuration's launch section does to the ranks of a job."""

import os
import signal
import time

import pytest
from pyspark.sql import SparkSession

from conf.load import load
from jobs.ranks import barrier_runner
from pipelines.launch.failure import RankLostError

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(180)]


def test_the_time_for_a_last_checkpoint_is_configured(spark: SparkSession, mlflow_store: str) -> None:
    def stops_too_late() -> None:
        if os.environ["HOROVOD_RANK"] == "1":
            os.kill(os.getppid(), signal.SIGTERM)  # the process of Spark's task
        time.sleep(300)  # longer than this test may take

    launch = load("smoke", ["launch.stop_grace_seconds=1.5"]).launch
    runner = barrier_runner(spark, launch, description="tests", log_to_driver="none")
    with pytest.raises(RankLostError, match=r"still ran 1\.5 s after it was asked to stop"):
        runner.run(stops_too_late)
