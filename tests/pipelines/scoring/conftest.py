"""What a small model predicts in one process."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.archives.table import open_archive
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.scoring import job
from pipelines.scoring.predict import predictor
from pipelines.scoring.predict.model import ModelDescription
from pipelines.storage.folder import Location


@pytest.fixture
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tasks are calls, and a model's probabilities of all classes are the mean of its first image group."""

    def load(model: ModelDescription, *_: Any) -> Callable[..., Any]:
        def predict(images: dict[str, Any]) -> Any:
            pixels = images[model.inputs[0].name]
            return np.repeat(
                pixels.mean((1, 2, 3))[:, None] / np.iinfo(pixels.dtype).max, len(model.class_names), 1
            ).astype(np.float32)

        return predict

    monkeypatch.setattr(predictor, "load_keras", load)
    monkeypatch.setattr(
        "pipelines.spark.tasks.run_tasks", lambda spark, items, function, **_: list(map(function, items))
    )
    monkeypatch.setattr("pipelines.spark.tasks.is_local_mode", lambda spark: True)
    monkeypatch.setattr(job, "is_local_mode", lambda spark: True)
    monkeypatch.setattr(job, "sent", lambda spark, file: nullcontext(SimpleNamespace(value=file)))
    yield
    predictor.forget()


@pytest.fixture(scope="session")
def expected(logged: Any) -> dict[str, Any]:
    """What Keras alone predicts of the small dataset, by id."""
    return logged.expected


@pytest.fixture(scope="session")
def labelled(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with enough samples to calibrate on."""
    folder = tmp_path_factory.mktemp("labelled")
    generate_bigearthnet_v2(folder / "BigEarthNet", train=64, validation=24, test=8, seed=5)
    archive = open_archive("bigearthnet_v2", root=str(folder / "BigEarthNet"))
    prepare_dataset(spark, archive, folder / "dataset", row_group_mib=1, row_groups_per_shard=2)
    return folder / "dataset"


@pytest.fixture
def small_model(small_dataset: Path, _without_spark: None) -> ModelDescription:
    """A model of the small dataset, which is a stand-in."""
    manifest = read_manifest(small_dataset)
    return ModelDescription("models:/fake/1", "m-1", "fake/1", manifest.task, manifest.class_names, manifest.groups)


@pytest.fixture(scope="session")
def predictions_of() -> Callable[[Path | str], list[dict[str, Any]]]:
    """Reads all rows of a folder of predictions, in the order of its manifest, and asserts that it holds no more."""

    def read(output: Path | str) -> list[dict[str, Any]]:
        folder = Location.at(output)
        manifest = json.loads(folder.read("predictions.json"))
        files = [part["file"] for part in manifest["parts"]]
        assert {*folder.files()} == {*files, "predictions.json", "_rejected.parquet"}
        rows = [row for file in files for row in pq.read_table(io.BytesIO(folder.read(file))).to_pylist()]
        assert len(rows) == manifest["predictions"]
        return rows

    return read


@pytest.fixture(scope="session")
def check_predictions() -> Callable[[list[dict[str, Any]], dict[str, Any]], None]:
    """Asserts that rows are of the expected samples, each once, with their probabilities."""

    def check(rows: list[dict[str, Any]], expected: dict[str, Any]) -> None:
        assert sorted(row["id"] for row in rows) == sorted(expected)
        np.testing.assert_allclose(
            [row["probabilities"] for row in rows], [expected[row["id"]] for row in rows], atol=1e-5
        )

    return check
