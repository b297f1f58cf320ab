"""Preparation, evaluation and scoring on a real server of Spark Connect; what needs a barrier stage is refused."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.dataset.manifest import read_manifest

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]


def on_connect(archive: str, folder: str, model: str, store: str) -> SimpleNamespace:
    """What a notebook on such a session does."""
    os.environ["MLFLOW_TRACKING_URI"] = store
    from pyspark.sql import SparkSession

    import groundswell
    from pipelines.scoring.frames import predict_udf, score_frame
    from pipelines.storage import Folder
    from pipelines.tasks import run_tasks

    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    dataset = f"{folder}/dataset"
    config = groundswell.load(
        "smoke",
        archive={"root": archive},
        dataset={"path": dataset},
        prepare={"row_group_mib": 1, "row_groups_per_shard": 2, "seed": 3},
    )
    groundswell.prepare(config)
    groundswell.score(groundswell.load(None, score={"batch_size": 5}), model, dataset, f"{folder}/predictions")
    evaluation = groundswell.evaluate(config, model)
    frame = spark.read.parquet(f"{dataset}/test")
    predict = predict_udf(spark, model, batch_size=4)
    columns = predict("bands_10m", "bands_20m", "bands_60m").alias("probabilities")
    by_frame, by_column = (
        {row["id"]: row["probabilities"] for row in each.collect()}
        for each in (score_frame(frame, model, batch_size=4), frame.select("id", columns))
    )
    refused = []
    for call in (
        lambda: groundswell.train(config),
        lambda: groundswell.BarrierRunner(spark, 2),
        lambda: groundswell.HorovodRunner(np=2).run(print),
        lambda: run_tasks(
            spark, [1, 0], lambda item: 1 // item, job="score", folder=Folder.at(folder), files=[], less_memory="x"
        ),
    ):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            refused.append(str(error))
    return SimpleNamespace(
        metrics=evaluation.metrics, by_frame=by_frame, by_column=by_column, refused=refused, kind=type(spark).__module__
    )


@pytest.fixture(scope="module")
def found(
    in_fresh_process: Callable[..., Any], small_archive: Path, logged: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("connect")
    before = os.environ.pop("MLFLOW_TRACKING_URI", None)
    try:
        return folder, in_fresh_process(on_connect, str(small_archive), str(folder), logged.uri, logged.store)
    finally:
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def test_everything_without_a_barrier_stage_runs_there(
    found: tuple[Path, SimpleNamespace], small_dataset: Path, expected: dict[str, Any]
) -> None:
    folder, connect = found
    assert connect.kind == "pyspark.sql.connect.session"
    ours, classic = read_manifest(folder / "dataset"), read_manifest(small_dataset)
    assert ours.fingerprint == classic.fingerprint
    assert {name: split.shards for name, split in ours.splits.items()} == {
        name: split.shards for name, split in classic.splits.items()
    }
    rows = [row for file in folder.glob("predictions/*-part-*.parquet") for row in pq.read_table(file).to_pylist()]
    assert {row["id"] for row in rows} == set(expected)
    for probabilities in ({row["id"]: row["probabilities"] for row in rows}, connect.by_frame, connect.by_column):
        assert probabilities
        for name, values in probabilities.items():
            np.testing.assert_allclose(values, expected[name], atol=1e-5)
    assert len(connect.by_frame) == len(connect.by_column) == 12
    assert 0 < connect.metrics["mean_average_precision"] <= 1


def test_what_cannot_run_there_says_why_in_a_line(found: tuple[Path, SimpleNamespace]) -> None:
    training, runner, old_runner, task = found[1].refused
    assert training.startswith("this process uses Spark Connect, which cannot run barrier stages (prepare, evaluate")
    assert runner.startswith("the session is one of Spark Connect, which cannot run barrier stages: pass a classic")
    assert all("dedicated access" in text for text in (training, runner, old_runner))
    assert task.startswith("Spark gave up: ZeroDivisionError: ")
    assert len(task.splitlines()) == 1
    assert "pyspark.sql.connect" not in sys.modules
