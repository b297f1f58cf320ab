"""Preparation, evaluation and scoring on a real server of Spark Connect; what needs a barrier stage is refused."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.dataset.format.manifest import read_manifest

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]


def on_connect(archive: str, folder: str, model: str, store: str) -> SimpleNamespace:
    """What a notebook on such a session does."""
    os.environ["MLFLOW_TRACKING_URI"] = store
    from pyspark.sql import SparkSession

    import groundswell
    from pipelines.scoring.predict.frames import predict_udf, score_frame
    from pipelines.spark.tasks import run_tasks
    from pipelines.storage.folder import Location

    spark, dataset = SparkSession.builder.remote("local[2]").getOrCreate(), f"{folder}/dataset"
    config = groundswell.load(
        "smoke",
        archive={"root": archive},
        dataset={"path": dataset},
        prepare={"row_group_mib": 1, "row_groups_per_shard": 2, "seed": 3},
    )
    groundswell.prepare(config)
    groundswell.score(groundswell.load(None, score={"batch_size": 5}), model, dataset, f"{folder}/predictions")
    evaluation, frame = groundswell.evaluate(config, model), spark.read.parquet(f"{dataset}/test")
    columns = predict_udf(spark, model, batch_size=4)("bands_10m", "bands_20m", "bands_60m").alias("probabilities")
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
            spark, [1, 0], lambda item: 1 // item, job="score", folder=Location.at(folder), files=[], less_memory="x"
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
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return folder, in_fresh_process(on_connect, str(small_archive), str(folder), logged.uri, logged.store)


def test_everything_without_a_barrier_stage_runs_there(
    found: tuple[Path, SimpleNamespace],
    small_dataset: Path,
    expected: dict[str, Any],
    predictions_of: Any,
    check_predictions: Any,
) -> None:
    folder, connect = found
    assert connect.kind == "pyspark.sql.connect.session"
    ours, classic = read_manifest(folder / "dataset"), read_manifest(small_dataset)
    assert (ours.fingerprint, {name: split.shards for name, split in ours.splits.items()}) == (
        classic.fingerprint,
        {name: split.shards for name, split in classic.splits.items()},
    )
    check_predictions(predictions_of(folder / "predictions"), expected)
    of_test = {name: expected[name] for name in connect.by_frame}
    for found_there in (connect.by_frame, connect.by_column):
        assert len(found_there) == 12
        check_predictions([{"id": name, "probabilities": found_there[name]} for name in found_there], of_test)
    assert 0 < connect.metrics["mean_average_precision"] <= 1


def test_what_cannot_run_there_says_why_in_a_line(found: tuple[Path, SimpleNamespace]) -> None:
    session = "the session is one of Spark Connect, which cannot run barrier stages: pass a classic"
    for text, begin, part in zip(
        found[1].refused,
        ("this process uses Spark Connect, which cannot run barrier stages (prepare, evaluate", session, "", "Spark"),
        ("dedicated access", "dedicated access", "dedicated access", "Spark gave up: ZeroDivisionError: "),
        strict=True,
    ):
        assert (text.startswith(begin), part in text, len(text.splitlines())) == (True, True, 1)
    assert "pyspark.sql.connect" not in sys.modules
