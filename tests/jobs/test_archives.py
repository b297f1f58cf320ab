"""Every kind of archive, prepared and trained on for a few steps, by the same configuration but its own section."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import rasterio
from pyspark.sql import SparkSession

from conf.load import load
from jobs.evaluate import evaluate
from jobs.prepare import prepare
from jobs.train import train
from pipelines.dataset.manifest import read_manifest

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(240)]

# GeoTIFFs without a place on earth are what this file writes.
GEOREFERENCE = "ignore::rasterio.errors.NotGeoreferencedWarning"


def eurosat(folder: Path) -> None:
    """Eight 13-band patches of each of two classes, one bright, one dark."""
    random = np.random.default_rng(0)
    for number, name in enumerate(("Forest", "SeaLake")):
        (folder / name).mkdir(parents=True)
        for patch in range(1, 9):
            path = folder / name / f"{name}_{patch}.tif"
            with rasterio.open(path, "w", driver="GTiff", width=64, height=64, count=13, dtype="uint16") as file:
                file.write(random.integers(0, 1000 + 2000 * number, (13, 64, 64), dtype=np.uint16))


def cifar(folder: Path, archive: Path) -> None:
    """Ten training and four test images of each of CIFAR-10's classes."""
    with zipfile.ZipFile(archive) as file:
        wanted: dict[str, int] = {}
        for name in sorted(file.namelist()):
            parent = name.rsplit("/", 1)[0]
            limit = 10 if "/train/" in name else 4
            if not name.endswith("/") and wanted.setdefault(parent, 0) < limit:
                wanted[parent] += 1
                file.extract(name, folder)


@pytest.mark.long
@pytest.mark.filterwarnings(GEOREFERENCE)
@pytest.mark.parametrize("kind", ["bigearthnet_v1", "image_folder", "eurosat_ms", "eurosat_rgb", "synthetic"])
def test_training_follows_the_dataset(
    spark: SparkSession, kind: str, tmp_path: Path, mlflow_store: str, request: pytest.FixtureRequest
) -> None:
    root = tmp_path / "archive"
    settings = ["training.epochs=1", "training.batch_size_per_worker=2"]
    split, classes = "test", 19
    match kind:
        case "bigearthnet_v1":
            root = request.getfixturevalue("shared_data") / "bigearthnet_v1"
            archive = {"kind": kind, "root": str(root), "subset": True}
            settings[1] = "training.batch_size_per_worker=1"
        case "eurosat_ms":
            eurosat(root)
            archive, classes = {"kind": kind, "root": str(root)}, 10
        case "eurosat_rgb":
            from PIL import Image

            for name in ("Forest", "SeaLake"):
                (root / name).mkdir(parents=True)
                for patch in range(1, 9):
                    Image.new("RGB", (64, 64), (patch * 20, 10, 0)).save(root / name / f"{name}_{patch}.jpg")
            archive, classes = {"kind": kind, "root": str(root)}, 10
        case "image_folder":
            cifar(tmp_path, request.getfixturevalue("shared_data") / "cifar10.zip")
            archive, classes = {"kind": kind, "root": str(tmp_path / "cifar10")}, 10
        case _:
            archive = {"kind": kind, "train": 8, "validation": 4, "test": 4}
    config = load(
        "smoke",
        [
            f"archive={archive}",
            f"dataset.path={tmp_path / 'dataset'}",
            f"training.output={tmp_path / 'outputs'}",
            *settings,
        ],
    )
    manifest = prepare(config)
    assert manifest == read_manifest(tmp_path / "dataset")
    assert len(manifest.class_names) == classes
    trained = train(config)
    (metrics,) = trained.summary.history
    assert np.isfinite(metrics["train/loss"])
    split = "test" if "test" in manifest.splits else "train"
    scores = evaluate(config, trained.summary.model_uri, split).metrics
    if manifest.task == "single_label":
        assert scores["top_1"] <= scores["top_5"] <= 1
        assert "f1_micro" not in scores
    else:
        assert 0 <= scores["f1_micro"] <= 1
        assert "top_1" not in scores
