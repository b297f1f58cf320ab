"""What `groundswell evaluate` measures, beside scikit-learn's figures for the same scores in one process."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession
from sklearn.metrics import average_precision_score, confusion_matrix, coverage_error, f1_score, log_loss

import jobs.evaluate
from conf.load import load
from jobs import cli
from jobs.evaluate import evaluate
from pipelines.dataset.manifest import read_manifest, write_manifest
from pipelines.dataset.reader import SplitReader
from pipelines.dataset.report.figures import preview
from pipelines.scoring.evaluation import SplitScores, measure, read_columns
from pipelines.scoring.evaluation_page import evaluation_page
from pipelines.storage import Folder
from pipelines.tracking.served import find_model
from pipelines.tracking.store import TrackedRun, TrackingError


@pytest.fixture(scope="module")
def measured(
    spark: SparkSession, logged: Any, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """The evaluation of the test split, and its report."""
    report = tmp_path_factory.mktemp("evaluation") / "report.html"
    # Two batches of five, and one of which three rows are padding.
    settings = ["training.batch_size_per_worker=5", f"evaluate.report={report}"]
    own = "training.metrics={coverage: {path: 'sklearn.metrics:coverage_error'}}"
    config = load("smoke", [f"dataset.path={small_dataset}", *settings, own])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", logged.store)
        return evaluate(config, logged.uri), report


def truth(dataset: Path, split: str, expected: Any) -> tuple[np.ndarray, np.ndarray]:
    """Targets of a split, and what Keras alone predicts of its samples."""
    reader = SplitReader(dataset, split)
    targets = reader.gather(np.arange(len(reader))).targets
    return targets, np.stack([expected[name] for name in reader.ids()])


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_every_figure_is_that_of_scikit_learn(measured: Any, small_dataset: Path, expected: Any) -> None:
    found, _ = measured
    targets, probabilities = truth(small_dataset, "test", expected)
    predicted = probabilities >= 0.5
    assert (predicted != predicted[0]).any(), "samples differ"
    columns = range(targets.shape[1])
    precisions = {
        column: average_precision_score(targets[:, column], probabilities[:, column])
        for column in columns
        if targets[:, column].any()
    }
    validation_targets, validation = truth(small_dataset, "validation", expected)
    thresholds = np.array([row["threshold"] for row in found.per_class])
    tuned = probabilities >= thresholds
    bins = np.clip((probabilities.reshape(-1) * 15).astype(int), 0, 14)
    flat, present = probabilities.reshape(-1).astype(np.float64), targets.reshape(-1)
    gaps = [abs(flat[bins == each].sum() - present[bins == each].sum()) for each in range(15)]
    assert found.metrics == pytest.approx(
        {
            "loss": np.mean([log_loss(targets[:, each], probabilities[:, each], labels=[0, 1]) for each in columns]),
            "f1_micro": f1_score(targets, predicted, average="micro"),
            "f1_macro": f1_score(targets, predicted, average="macro", zero_division=0),
            "mean_average_precision": sum(precisions.values()) / len(precisions),
            "expected_calibration_error": sum(gaps) / len(flat),
            "f1_micro_tuned": f1_score(targets, tuned, average="micro"),
            "f1_macro_tuned": f1_score(targets, tuned, average="macro", zero_division=0),
            "coverage": coverage_error(targets, probabilities),
        },
        abs=1e-5,
    )
    for column in columns:
        row = found.per_class[column]
        assert row["support"] == targets[:, column].sum()
        assert row["f1"] == pytest.approx(f1_score(targets[:, column], predicted[:, column], zero_division=0))
        if column in precisions:
            assert row["average_precision"] == pytest.approx(precisions[column], abs=1e-5)
        if validation_targets[:, column].any():
            best = max(
                f1_score(validation_targets[:, column], validation[:, column] >= threshold, zero_division=0)
                for threshold in [*validation[:, column], 0.0]
            )
            at = f1_score(validation_targets[:, column], validation[:, column] >= row["threshold"], zero_division=0)
            assert at == pytest.approx(best)


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_it_is_recorded_in_a_child_run_and_in_the_run_of_the_training(
    measured: Any, logged: Any, artifact_text: Callable[[str, str, str], str]
) -> None:
    found, report = measured
    client = MlflowClient(logged.store)
    parent = client.get_run(logged.uri.split("/")[1])
    of_parent = f"tags.mlflow.parentRunId = '{parent.info.run_id}' and attributes.run_name = 'evaluate test'"
    (child,) = client.search_runs([parent.info.experiment_id], of_parent)
    scores = {f"test/{name}": value for name, value in found.metrics.items()}
    assert child.data.metrics == pytest.approx(scores)
    assert {name: parent.data.metrics[name] for name in scores} == pytest.approx(scores)
    assert child.info.status == "FINISHED"
    assert child.data.params["split"] == "test"
    # Beside the validation of the same model, and not at the beginning of the training.
    for each in (parent, child):
        assert [point.step for point in client.get_metric_history(each.info.run_id, "test/f1_micro")] == [1]
    assert child.data.tags["mlflow.source.name"] == "groundswell evaluate"
    assert {"mlflow.user", "groundswell.version"} <= child.data.tags.keys()
    (dataset,) = child.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.tags[0].value) == ("bigearthnet_v2", "evaluation")
    artifacts = {item.path for item in client.list_artifacts(child.info.run_id)}
    assert artifacts == {
        "evaluation_test.html",
        "label_pairs_test.json",
        "per_class_test.json",
        "per_class_test.png",
        "reliability_test.json",
        "slices_test.json",
    }
    assert artifact_text(logged.store, child.info.run_id, "evaluation_test.html") == report.read_text()
    table = json.loads(artifact_text(logged.store, child.info.run_id, "slices_test.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    for column in ("country", "season", "tile"):
        assert sum(row["samples"] for row in rows if row["column"] == column) == 12


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_scores_of_another_dataset_stay_in_their_own_run_also_where_the_disk_takes_no_report(
    measured: Any, logged: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    client, run_id = MlflowClient(logged.store), logged.uri.split("/")[1]
    other = tmp_path / "other"
    shutil.copytree(small_dataset, other)
    manifest = read_manifest(other)
    (other / "dataset.json").unlink()
    write_manifest(manifest.model_copy(update={"source_fingerprint": "of another archive"}), other)
    before = client.get_metric_history(run_id, "test/loss")
    settings = [f"dataset.path={other}", "evaluate.tune_thresholds=false", "evaluate.report=/dev/full"]
    with pytest.raises(RuntimeError, match=r"^evaluate\.report=/dev/full cannot be written \(No space left") as full:
        evaluate(load("smoke", settings), logged.uri)
    assert client.get_metric_history(run_id, "test/loss") == before
    own = client.get_run(str(full.value).rpartition(" ")[2]).data.metrics
    assert own["test/loss"] == pytest.approx(measured[0].metrics["loss"])


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_scores_of_a_model_whose_training_was_deleted_are_in_a_run_of_their_own(
    logged: Any, small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    client, run_id = MlflowClient(logged.store), logged.uri.split("/")[1]
    settings = [f"dataset.path={small_dataset}", "evaluate.tune_thresholds=false", "tracking.experiment=of its own"]
    client.delete_run(run_id)
    try:
        found = evaluate(load("smoke", settings), logged.uri)
    finally:
        client.restore_run(run_id)  # other tests need it
    stored = client.get_run(found.run.run_id)
    assert client.get_experiment(stored.info.experiment_id).name == "of its own"
    assert "mlflow.parentRunId" not in stored.data.tags
    assert stored.data.metrics["test/loss"] == pytest.approx(found.metrics["loss"])


def test_a_report_that_cannot_be_written_is_found_out_before_the_scores(small_dataset: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "index.html"
    foreign.write_text("<html>mine</html>")
    for report, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "missing" / "a.html", "there is no folder"),
        (foreign, "which groundswell has not written: move or remove index"),
        (small_dataset / "report.html", f"would write into the dataset {small_dataset}, whose folder holds its own"),
    ):
        with pytest.raises(ValueError, match=rf"^evaluate\.report={report}.* {message}"):
            evaluate(load("smoke", [f"dataset.path={small_dataset}", f"evaluate.report={report}"]), "runs:/0123/model")


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_scores_that_the_store_does_not_take_end_the_child_run(
    measured: Any, logged: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    monkeypatch.setattr("jobs.evaluate.RunWriter.drain", lambda writer: "no answer within 4 s")
    config = load("smoke", [f"dataset.path={small_dataset}", "evaluate.tune_thresholds=false"])
    with pytest.raises(TrackingError, match=r"did not take the scores \(no answer within 4 s\): loss .*, f1_micro \d"):
        evaluate(config, logged.uri, "validation")
    client = MlflowClient(logged.store)
    parent = client.get_run(logged.uri.split("/")[1])
    children = client.search_runs([parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'")
    ended = {child.info.run_name: child.info.status for child in children}
    assert ended == {"evaluate test": "FINISHED", "evaluate validation": "FAILED"}

    def gone(run: TrackedRun) -> bool:
        raise TrackingError("no answer from MLflow")

    monkeypatch.setattr("jobs.evaluate.has_run", gone)
    report = tmp_path / "report.html"
    with pytest.raises(TrackingError, match=r"did not take the scores \(no answer from MLflow\): loss .*, f1_micro \d"):
        evaluate(config.override(f"evaluate.report={report}"), logged.uri, "validation")
    assert "<html" in report.read_text()


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(280)
def test_scoring_takes_the_thresholds_that_were_tuned(
    measured: Any, logged: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    tuned = [row["threshold"] for row in measured[0].per_class]
    assert len(set(tuned)) > 1
    output = tmp_path / "predictions"
    assert cli.execute(["score", "--model", logged.uri, "--input", str(small_dataset), "--output", str(output)]) == 0
    manifest = json.loads((output / "predictions.json").read_text())
    assert manifest["identity"]["score.threshold"] == pytest.approx(tuned)
    for part in manifest["parts"]:
        for row in pq.read_table(output / part["file"]).to_pylist():
            likely = zip(manifest["class_names"], row["probabilities"], tuned, strict=True)
            assert row["labels"] == [name for name, value, threshold in likely if value >= threshold]


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_scores_of_an_image_and_its_mirror_image_have_a_name_of_their_own(
    measured: Any,
    logged: Any,
    small_dataset: Path,
    expected: Any,
    plain_predictions: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    before = find_model(logged.uri).metadata.thresholds
    settings = ["training.batch_size_per_worker=5", "evaluate.test_time_augmentation=mirror"]
    found = evaluate(load("smoke", [f"dataset.path={small_dataset}", *settings]), logged.uri)
    mirrored = plain_predictions(logged.file, small_dataset, mirrored=True)
    both = {name: (expected[name] + mirrored[name]) / 2 for name in expected}
    targets, probabilities = truth(small_dataset, "test", both)
    losses = [log_loss(targets[:, each], probabilities[:, each], labels=[0, 1]) for each in range(targets.shape[1])]
    assert found.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert found.metrics["loss"] != pytest.approx(measured[0].metrics["loss"], abs=1e-5)

    client = MlflowClient(logged.store)
    child = client.get_run(found.run.run_id)
    assert child.info.run_name == "evaluate test mirror"
    assert child.data.params["test_time_augmentation"] == "mirror"
    assert child.data.metrics["test_mirror/loss"] == pytest.approx(found.metrics["loss"])
    parent = client.get_run(logged.uri.split("/")[1]).data.metrics
    assert parent["test_mirror/loss"] == pytest.approx(found.metrics["loss"])
    assert parent["test/loss"] == pytest.approx(measured[0].metrics["loss"])
    # Thresholds that suit the means are not those of single images, which `score` predicts.
    assert find_model(logged.uri).metadata.thresholds == before


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_several_splits_are_measured_as_one_with_a_slice_each(
    logged: Any,
    small_dataset: Path,
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    artifact_text: Callable[[str, str, str], str],
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    report, result = tmp_path / "report.html", tmp_path / "result.json"
    # By its name in the registry, where the other tests name the run.
    line = ["evaluate", "--config", "smoke", "--model", "models:/scored/1", "--split", "train,test"]
    line += ["--result", str(result)]
    for setting in (f"dataset.path={small_dataset}", f"evaluate.report={report}", "tracking.experiment=scoring"):
        line += ["--set", setting]
    assert cli.execute(line) == 0
    parts = [truth(small_dataset, split, expected) for split in ("test", "train")]
    targets, probabilities = (np.concatenate(both) for both in zip(*parts, strict=True))
    metrics = json.loads(result.read_text())["metrics"]
    assert metrics["test-train/f1_micro"] == pytest.approx(f1_score(targets, probabilities >= 0.5, average="micro"))
    client = MlflowClient(logged.store)
    parent = logged.uri.split("/")[1]
    assert client.get_run(parent).data.metrics.items() >= metrics.items()
    (child,) = client.search_runs(
        [client.get_run(parent).info.experiment_id], "attributes.run_name = 'evaluate test-train'"
    )
    table = json.loads(artifact_text(logged.store, child.info.run_id, "slices_test-train.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    found = {row["value"]: row for row in rows if row["column"] == "split"}
    assert {name: row["samples"] for name, row in found.items()} == {"train": 32, "test": 12}
    for name, (own, predicted) in zip(("test", "train"), parts, strict=True):
        assert found[name]["f1_micro"] == pytest.approx(f1_score(own, predicted >= 0.5, average="micro"))
    assert sum(row["samples"] for row in rows if row["column"] == "country") == 44
    page = report.read_text()
    assert "Evaluation on test, train" in page
    assert page.count("<img ") == 25


def evaluate_on_two_executors(model: str, settings: list[str]) -> tuple[dict[str, float], list[int]]:
    """The scores of the training split, and how many tasks each executor has done."""
    from pyspark.sql import SparkSession

    from conf.load import load
    from jobs.evaluate import evaluate

    settings_of_spark = {
        "spark.ui.enabled": "false",
        # Tasks wait for both executors, however long these take.
        "spark.cores.max": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "200s",
    }
    spark = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings_of_spark).getOrCreate()
    try:
        metrics = evaluate(load("smoke", settings), model, "train").metrics
        executors = spark.sparkContext._jsc.sc().statusStore().executorList(False)
        each = [executors.apply(index) for index in range(executors.size())]
        return metrics, [executor.completedTasks() for executor in each if executor.id() != "driver"]
    finally:
        spark.stop()


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(280)
def test_an_exported_model_is_evaluated_on_several_executors(
    in_fresh_process: Callable[..., Any],
    logged: Any,
    small_dataset: Path,
    expected: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    mlflow.artifacts.download_artifacts(logged.uri, dst_path=str(tmp_path / "exported"), tracking_uri=logged.store)
    (exported,) = (path.parent for path in (tmp_path / "exported").rglob("MLmodel"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    settings = [f"dataset.path={small_dataset}", "evaluate.tune_thresholds=false"]
    metrics, tasks = in_fresh_process(evaluate_on_two_executors, str(exported), settings)
    assert len(tasks) == 2
    assert min(tasks) > 0
    targets, probabilities = truth(small_dataset, "train", expected)
    predicted = probabilities >= 0.5
    assert metrics["f1_micro"] == pytest.approx(f1_score(targets, predicted, average="micro"))
    assert metrics["f1_macro"] == pytest.approx(f1_score(targets, predicted, average="macro", zero_division=0))
    assert not any(name.endswith("_tuned") for name in metrics)


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_curves_of_the_training_and_scores_of_other_weights_stay(
    logged: Any, small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", logged.store)
    client, run_id = MlflowClient(logged.store), logged.uri.split("/")[1]

    def recorded() -> dict[str, float]:
        return dict(client.get_run(run_id).data.metrics)

    before, config = recorded(), load("smoke", [f"dataset.path={small_dataset}", "evaluate.tune_thresholds=false"])
    assert "f1_micro" in evaluate(config, logged.uri, "train").metrics
    assert recorded() == before
    served = find_model(logged.uri)
    averaged = replace(served, metadata=replace(served.metadata, ema=0.99))
    monkeypatch.setattr(jobs.evaluate, "find_model", lambda uri: averaged)
    scores = evaluate(config, logged.uri, "test").metrics
    new = {name: value for name, value in recorded().items() if name not in before}
    assert new == pytest.approx({f"test_ema/{name}": value for name, value in scores.items()})
    assert {name: value for name, value in recorded().items() if name in before} == before


def test_a_store_that_does_not_answer_is_one_line(
    logged: Any, small_dataset: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(jobs.evaluate, "spark_session", None)
    line = ["evaluate", "--config", "smoke", "--model", logged.uri, "--set", f"dataset.path={small_dataset}"]
    assert cli.execute(line) == 4
    (printed,) = capsys.readouterr().err.splitlines()
    assert "no answer from MLflow, see MLFLOW_TRACKING_URI: API request to" in printed


def test_slices_and_pairs_are_those_of_their_samples(small_dataset: Path) -> None:
    manifest = read_manifest(small_dataset)
    reader = SplitReader(small_dataset, "train")
    targets = reader.gather(np.arange(len(reader))).targets
    random = np.random.default_rng(0)
    probabilities = np.clip(targets * 0.4 + random.random(targets.shape) * 0.6, 0, 1).astype(np.float32)
    columns = read_columns(Folder.at(small_dataset), ["train"])
    scores = SplitScores(reader.ids(), probabilities, targets)
    found = measure(scores, class_names=manifest.class_names, task="multi_label", columns=columns, own_metrics={})
    for column in ("country", "season", "tile"):
        values = np.array(columns[column].to_pylist())
        rows = {each.value: each.as_row() for each in found.slices if each.column == column}
        assert set(rows) == set(values)
        assert len(rows) > 1, column
        for value, row in rows.items():
            chosen = values == value
            predicted = probabilities[chosen] >= 0.5
            assert row["samples"] == chosen.sum()
            assert row["f1_micro"] == pytest.approx(f1_score(targets[chosen], predicted, average="micro"))
            assert row["f1_macro"] == pytest.approx(
                f1_score(targets[chosen], predicted, average="macro", zero_division=0)
            )
    predicted = probabilities >= 0.5
    for row in found.pairs:
        missed, invented = (manifest.class_names.index(row[name]) for name in ("missed", "predicted"))
        both = (targets[:, missed] & ~predicted[:, missed]) & (
            predicted[:, invented] & ~targets[:, invented].astype(bool)
        )
        assert row["samples"] == both.sum() > 0
    losses = [
        log_loss(row_targets, row, labels=[0, 1]) for row_targets, row in zip(targets, probabilities, strict=True)
    ]
    np.testing.assert_allclose(scores.losses("multi_label"), losses, rtol=1e-5)


def test_one_label_has_a_confusion_matrix_and_no_thresholds() -> None:
    random = np.random.default_rng(1)
    classes = random.integers(0, 7, 200)
    targets = np.eye(7, dtype=np.uint8)[classes]
    probabilities = random.dirichlet(np.ones(7), 200).astype(np.float32)
    scores = SplitScores([str(number) for number in range(200)], probabilities, targets)
    names = [f"class {number}" for number in range(7)]
    found = measure(
        scores, class_names=names, task="single_label", columns=pa.table({}), own_metrics={}, validation=scores
    )
    scored = {"top_1", "top_5", "f1_macro", "mean_average_precision"}
    assert set(found.metrics) == {"loss", *scored, "expected_calibration_error"}
    assert found.metrics["loss"] == pytest.approx(log_loss(classes, probabilities), rel=1e-5)
    assert found.thresholds is None
    assert found.metrics["top_1"] == (probabilities.argmax(1) == classes).mean()
    matrix = confusion_matrix(classes, probabilities.argmax(1))
    for row in found.pairs:
        assert row["samples"] == matrix[names.index(row["missed"]), names.index(row["predicted"])]
    assert sum(row["samples"] for row in found.pairs) == matrix.sum() - np.trace(matrix)
    np.testing.assert_allclose(scores.losses("single_label").mean(), log_loss(classes, probabilities), rtol=1e-5)


def test_the_best_and_the_worst_patches_are_those_of_the_smallest_and_the_largest_loss(small_dataset: Path) -> None:
    reader = SplitReader(small_dataset, "train")
    batch, ids = reader.gather(np.arange(len(reader))), reader.ids()
    # Every class of a patch is wrong by the same amount, so its loss is -log(1 - error).
    errors = np.random.default_rng(2).permutation(np.linspace(0.05, 0.45, len(ids)))
    probabilities = np.abs(batch.targets - errors[:, np.newaxis]).astype(np.float32)
    scores = SplitScores(ids, probabilities, batch.targets)
    manifest = reader.manifest
    found = measure(scores, class_names=manifest.class_names, task="multi_label", columns=pa.table({}), own_metrics={})
    page = evaluation_page(found, scores, [reader], "train", {})
    by_error = np.argsort(errors)
    for section, rows in (("best", by_error[:12]), ("worst", by_error[::-1][:12])):
        (content,) = re.findall(rf'<section id="{section}">(.*?)</section>', page, re.DOTALL)
        shown = re.findall(r'<img src="(.*?)" alt="Patch (.*?)">', content)
        assert [name for _, name in shown] == [ids[row] for row in rows]
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)</code>", content)]
        assert losses == pytest.approx(-np.log(1 - errors[rows]), abs=0.0006)
        for (picture, _), row in zip(shown, rows, strict=True):
            assert picture == preview({name: pixels[row] for name, pixels in batch.images.items()}, manifest.groups)


@pytest.mark.timeout(120)
def test_a_browser_shows_the_whole_report(show_page: Callable[..., Any], small_dataset: Path, tmp_path: Path) -> None:
    reader = SplitReader(small_dataset, "train")
    targets = reader.gather(np.arange(len(reader))).targets
    random = np.random.default_rng(0)
    probabilities = np.clip(targets * 0.5 + random.random(targets.shape) * 0.55, 0, 1).astype(np.float32)
    scores = SplitScores(["<script>alert(1)</script>", *reader.ids()[1:]], probabilities, targets)
    found = measure(
        scores,
        class_names=reader.manifest.class_names,
        task="multi_label",
        columns=read_columns(Folder.at(small_dataset), ["train"]),
        own_metrics={},
        validation=scores,
    )
    page = evaluation_page(found, scores, [reader], "train", {"Model": "models:/land cover/3"})
    screenshot = Path(os.environ.get("GROUNDSWELL_SCREENSHOT", tmp_path / "page.png"))
    for width in (1280, 390):
        picture = screenshot.with_stem(f"{screenshot.stem}-{width}")
        shown, _ = show_page(page, width, height=5200, screenshot=picture)
        assert len(shown["images"]) == page.count("<img ") == 25
        assert min(shown["images"]) >= 100
        assert shown["overflow"] == 0
        assert shown["scripts"] == 1
