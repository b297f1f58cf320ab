"""Every kind of archive, prepared and trained on, by the same configuration but its own section."""

import zipfile
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import rasterio
import tensorflow as tf
from PIL import Image
from pyspark.sql import SparkSession

from conf.load import load
from conf.schema import RunConfig
from jobs.evaluate import evaluate
from jobs.prepare import prepare
from jobs.train import train
from models.losses import classification_loss
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.read.reader import SplitReader, training_batches
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.setup.recipe import make_mode, make_model
from pipelines.training.step.tensors import image_tensors

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(240)]


def eurosat(folder: Path, ending: str) -> None:
    """Eight patches of each of two classes, one bright, one dark: GeoTIFFs of 13 bands, or pictures."""
    random = np.random.default_rng(0)
    for number, name in enumerate(("Forest", "SeaLake")):
        (folder / name).mkdir(parents=True)
        for path in (folder / name / f"{name}_{patch}.{ending}" for patch in range(1, 9)):
            pixels = random.integers(0, 128 + 127 * number, (13, 64, 64), dtype=np.uint8)
            if ending == "jpg":
                Image.fromarray(pixels[:3].transpose(1, 2, 0)).save(path)
                continue
            with rasterio.open(path, "w", driver="GTiff", width=64, height=64, count=13, dtype="uint16") as file:
                file.write(pixels.astype(np.uint16))


def cifar(folder: Path, archive: Path) -> None:
    """Ten training and four test images of each of CIFAR-10's classes."""
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if not name.endswith("/"))
        for parent, images in groupby(names, key=lambda name: name.rsplit("/", 1)[0]):
            file.extractall(folder, list(images)[: 10 if "/train/" in parent else 4])


def prepared(archive: dict[str, object], folder: Path, *settings: str) -> tuple[RunConfig, Manifest]:
    """The configuration, and the dataset that it prepared."""
    places = [f"dataset.path={folder / 'dataset'}", f"training.output={folder / 'outputs'}"]
    config = load("smoke", [f"archive={archive}", *places, "training.epochs=1", *settings])
    manifest = prepare(config)
    assert manifest == read_manifest(folder / "dataset")
    return config, manifest


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "classes", "batch_size", "score", "of_others"),
    [("bigearthnet_v1", 19, 1, "f1_micro", "top_1"), ("image_folder", 10, 2, "top_1", "f1_micro")],
)
def test_training_and_evaluation_follow_the_dataset(
    spark: SparkSession,
    shared_data: Path,
    small_network: str,
    tmp_path: Path,
    mlflow_store: str,
    kind: str,
    classes: int,
    batch_size: int,
    score: str,
    of_others: str,
) -> None:
    """One dataset with several labels per image, one with one."""
    archive: dict[str, object] = {"kind": kind, "root": str(shared_data / kind), "subset": True}
    if kind == "image_folder":
        cifar(tmp_path, shared_data / "cifar10.zip")
        archive = {"kind": kind, "root": str(tmp_path / "cifar10")}
    config, manifest = prepared(archive, tmp_path, small_network, f"training.batch_size_per_worker={batch_size}")
    assert len(manifest.class_names) == classes
    trained = train(config)
    (metrics,) = trained.summary.history
    assert np.isfinite(metrics["train/loss"])
    scores = evaluate(config, trained.summary.model_uri, "test").metrics
    assert 0 <= scores[score] <= scores.get("top_5", 1) <= 1
    assert of_others not in scores


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")  # of what this file writes
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("eurosat_ms", [(64, 64, 13)]),
        ("eurosat_rgb", [(64, 64, 3)]),
        ("synthetic", [(120, 120, 4), (60, 60, 6), (20, 20, 2)]),
    ],
)
def test_a_step_on_every_other_archive(
    spark: SparkSession, small_network: str, tmp_path: Path, kind: str, shapes: list[tuple[int, int, int]]
) -> None:
    """The model's inputs and the loss follow the dataset."""
    eurosat(tmp_path / "archive", "tif" if kind == "eurosat_ms" else "jpg")
    archive: dict[str, object] = {"kind": kind, "root": str(tmp_path / "archive")}
    if kind == "synthetic":
        archive = {"kind": kind, "train": 8, "validation": 4, "test": 4}
    config, manifest = prepared(archive, tmp_path, small_network)
    assert [group.shape for group in manifest.groups] == shapes
    model = make_model(config, manifest)
    mode = make_mode(config, model, classification_loss(manifest.task), HorovodCollective(), steps_per_epoch=1)
    batch = next(training_batches(SplitReader(config.dataset.path, "train"), seed=0, epoch=0, global_batch_size=4))
    assert np.isfinite(float(mode.step(image_tensors(batch.images), tf.convert_to_tensor(batch.targets, tf.float32))))
