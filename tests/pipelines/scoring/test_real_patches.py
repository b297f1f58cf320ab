"""A model trained on real patches, scored back from their archive by each runtime, beside what `evaluate` measures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from sklearn.metrics import average_precision_score, f1_score

from conf.load import load
from jobs.evaluate import evaluate
from jobs.prepare import prepare
from jobs.shell import cli
from jobs.train import train
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.scoring.predict.processor import why_unusable

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(900)]
SPLITS = ("train", "test")
SAME_LABELS = {"keras": 1.0, "bf16": 0.95, "int8": 0.85}
"""Least part of the patches with the labels of Keras. Of int8, which is calibrated on 64 generated patches here, 28 of
30 were measured."""


def predicted(output: Path) -> dict[str, Any]:
    manifest = json.loads((output / "predictions.json").read_text())
    rows = [row for part in manifest["parts"] for row in pq.read_table(output / part["file"]).to_pylist()]
    assert manifest["rejected"] == 0
    return {row["id"]: row for row in rows}


def test_every_runtime_gives_the_metrics_of_evaluate(
    spark: SparkSession, shared_data: Path, labelled: Path, mlflow_store: str, tmp_path: Path
) -> None:
    root, dataset = shared_data / "bigearthnet_v2", tmp_path / "dataset"
    settings = [f"dataset.path={dataset}", f"training.output={tmp_path}", f"archive.root={root}", "training.epochs=4"]
    config = load("smoke", settings)
    prepare(config)
    uri, names = train(config).summary.model_uri, list(read_manifest(dataset).class_names)
    measured = {split: evaluate(config, uri, split).metrics for split in SPLITS}
    runtimes, of_keras = ["keras", *(each for each in ("bf16", "int8") if why_unusable(each) is None)], {}
    for runtime in runtimes:
        output = tmp_path / runtime
        line = [
            "score",
            "--model",
            uri,
            "--input",
            str(root),
            "--output",
            str(output),
            "--set",
            "archive=bigearthnet_v2",
            "--set",
            "score.threshold=0.5",
        ]
        if runtime != "keras":
            # The archive's sample has too few patches to calibrate on.
            chosen = [f"runtime={runtime}", f"reference_dataset={labelled}", "acceptance_samples=24", "max_f1_drop=0.2"]
            chosen += ["calibration_samples=64"] * (runtime == "int8")
            line += [part for text in chosen for part in ("--set", f"score.{text}")]
        assert cli.execute(line) == 0
        rows = predicted(output)
        assert len(rows) == 30
        of_keras = of_keras or rows
        different = [set(rows[name]["labels"]) ^ set(row["labels"]) for name, row in of_keras.items()]
        assert np.mean([not labels for labels in different]) >= SAME_LABELS[runtime], (runtime, different)
        assert sum(map(len, different)) <= 0.02 * len(rows) * len(names), (runtime, different)
        for split in SPLITS:
            reader = SplitReader(dataset, split)
            targets, own = reader.gather(np.arange(len(reader))).targets, [rows[name] for name in reader.ids()]
            assert {row["split"] for row in own} == {split}
            labels = np.array([[name in row["labels"] for name in names] for row in own])
            probabilities, present = np.array([row["probabilities"] for row in own]), targets.any(axis=0)
            precision = average_precision_score(targets[:, present], probabilities[:, present], average="macro")
            found = {
                "f1_micro": f1_score(targets, labels, average="micro", zero_division=0),
                "f1_macro": f1_score(targets, labels, average="macro", zero_division=0),
                "mean_average_precision": precision,
            }
            tolerance = 1e-6 if runtime == "keras" else 0.1
            assert found == pytest.approx({name: measured[split][name] for name in found}, abs=tolerance), (
                runtime,
                split,
            )
