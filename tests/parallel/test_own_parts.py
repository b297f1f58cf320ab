"""Two ranks train with parts that are not ours: those of libraries, and those of the page "write your own"."""

import re
import shlex
from pathlib import Path

import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from conf.load import load
from jobs.evaluate import evaluate
from jobs.prepare import prepare
from jobs.train import train
from pipelines.tracking.models.models import model_metadata

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(240)]


def test_a_network_of_keras_on_three_bands(
    spark: SparkSession, small_dataset: Path, mlflow_store: str, tmp_path: Path
) -> None:
    network, focal = "{alpha: 0.25, dropout: 0.1}", "{from_logits: true, gamma: 3.0}"
    config = load(
        "smoke",
        [
            f"dataset.path={small_dataset}",
            f"training.output={tmp_path}",
            "training.epochs=1",
            f"model={{name: import, path: 'keras.applications:MobileNet', settings: {network}}}",
            "input.bands=[B04, B03, B02]",
            "input.augmentation=pad_crop",
            f"training.loss={{name: import, path: 'keras.losses:binary_focal_crossentropy', settings: {focal}}}",
            "training.metrics={ranking: {path: 'sklearn.metrics:label_ranking_average_precision_score'}}",
        ],
    )
    trained = train(config)
    run = MlflowClient(mlflow_store).get_run(trained.run.run_id)
    assert (
        run.info.status,
        run.data.params["model.path"],
        run.data.params["input.augmentation.padding"],
        model_metadata(trained.summary.model_uri).bands,
    ) == ("FINISHED", "keras.applications:MobileNet", "4", ("B04", "B03", "B02"))
    # An undecided network has a focal loss of 0.5 ** 3 * log 2 = 0.087, where its cross-entropy is log 2 = 0.69.
    assert 0 < run.data.metrics["train/loss"] < 0.3
    assert 0 < run.data.metrics["val/ranking"] <= 1
    metrics = evaluate(config, trained.summary.model_uri).metrics
    assert 0 <= metrics["f1_micro"] <= 1
    assert 0 < metrics["ranking"] <= 1


def test_the_examples_of_the_page_prepare_and_train(
    spark: SparkSession, mlflow_store: str, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = []
    for text in re.findall(r"```python\n(.*?)```", (project / "jobs/WRITE_YOUR_OWN.md").read_text(), re.DOTALL):
        name, _, command = text.partition("\n")[0].removeprefix("# ").partition(": --set ")
        module = tmp_path / "own" / name
        module.parent.mkdir(exist_ok=True)
        module.write_text(text)
        spark.sparkContext.addPyFile(str(module))  # as `spark-submit --py-files` brings it
        settings += shlex.split(command)
    monkeypatch.syspath_prepend(str(tmp_path / "own"))
    of_archive = settings.pop([setting.partition("=")[0] for setting in settings].index("archive"))
    assert len(settings) == 5  # a network, a loss, a metric, an augmentation and a mode
    dataset = f"dataset.path={tmp_path / 'dataset'}"
    prepare(load("smoke", [dataset, of_archive]))
    config = load("smoke", [dataset, f"training.output={tmp_path / 'run'}", "training.epochs=1", *settings])
    (history,) = train(config).summary.history
    assert (history["train/loss"] > 0, 0 <= history["val/exact"] <= 1) == (True, True)
