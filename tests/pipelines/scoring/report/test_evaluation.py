"""What `groundswell evaluate` measures, beside scikit-learn's figures for the same scores in one process."""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlflow
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from sklearn.metrics import average_precision_score, confusion_matrix, coverage_error, f1_score, log_loss

import jobs.evaluate
from conf.load import load
from conf.schema import RunConfig
from jobs.evaluate import evaluate
from jobs.shell import cli
from pipelines.dataset.read.reader import SplitReader
from pipelines.dataset.report.figures import preview
from pipelines.scoring.predict.model import describe
from pipelines.scoring.report.evaluation import Measured, SplitScores, measure, read_columns
from pipelines.scoring.report.evaluation_page import evaluation_page
from pipelines.scoring.source import DatasetPart, Source
from pipelines.storage.folder import Location
from pipelines.tracking.store.served import find_model
from pipelines.tracking.store.store import TrackingError


def config_of(dataset: Path, *settings: str, tuned: bool = False) -> RunConfig:
    """Two batches of five, and one of which three rows are padding: one compiled function for all tests."""
    always = ["training.batch_size_per_worker=5", *(["evaluate.tune_thresholds=false"] * (not tuned))]
    return load("smoke", [f"dataset.path={dataset}", *always, *settings])


@pytest.fixture
def _scored_before(logged: Any, _use_store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of Keras alone, without Spark: for tests of what becomes of them."""

    def collect(spark: None, model: object, file: bytes, source: Source, **settings: object) -> SplitScores:
        (split,) = {part.split for part in source.parts if isinstance(part, DatasetPart)}
        targets, probabilities = truth(Path(source.where), split, logged.expected)
        return SplitScores(SplitReader(source.where, split).ids(), probabilities, targets)

    monkeypatch.setattr(jobs.evaluate, "collect_scores", collect)
    monkeypatch.setattr(jobs.evaluate, "spark_session", lambda *_, **__: nullcontext())


@pytest.fixture(scope="module")
def measured(
    spark: SparkSession, logged: Any, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """The evaluation of the test split, and its report."""
    report = tmp_path_factory.mktemp("evaluation") / "report.html"
    own = "training.metrics={coverage: {path: 'sklearn.metrics:coverage_error'}}"
    config = config_of(small_dataset, f"evaluate.report={report}", own, tuned=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", logged.store)
        return evaluate(config, logged.uri), report


F1 = ("micro", "macro")


def truth(dataset: Path, split: str, expected: Any) -> tuple[np.ndarray, np.ndarray]:
    """Targets of a split, and what Keras alone predicts of its samples."""
    reader = SplitReader(dataset, split)
    return reader.gather(np.arange(len(reader))).targets, np.stack([expected[name] for name in reader.ids()])


def mean_loss(targets: np.ndarray, probabilities: np.ndarray) -> float:
    columns = zip(targets.T, probabilities.T, strict=True)
    return float(np.mean([log_loss(present, predicted, labels=[0, 1]) for present, predicted in columns]))


def rows_of(text: str) -> list[dict[str, Any]]:
    """The rows of a table among the artifacts."""
    table = json.loads(text)
    return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_every_figure_is_that_of_scikit_learn(measured: Any, small_dataset: Path, expected: Any) -> None:
    found, _ = measured
    targets, probabilities = truth(small_dataset, "test", expected)
    predicted, columns = probabilities >= 0.5, range(targets.shape[1])
    assert (predicted != predicted[0]).any(), "samples differ"
    precisions = {
        column: average_precision_score(targets[:, column], probabilities[:, column])
        for column in columns
        if targets[:, column].any()
    }
    validation_targets, validation = truth(small_dataset, "validation", expected)
    tuned = probabilities >= np.array([row["threshold"] for row in found.per_class])
    bins = np.clip((probabilities.reshape(-1) * 15).astype(int), 0, 14)
    flat, present = probabilities.reshape(-1).astype(np.float64), targets.reshape(-1)
    gaps = [abs(flat[bins == each].sum() - present[bins == each].sum()) for each in range(15)]
    assert found.metrics == pytest.approx(
        {
            "loss": mean_loss(targets, probabilities),
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
        row, own = found.per_class[column], f1_score(targets[:, column], predicted[:, column], zero_division=0)
        assert (row["support"], row["f1"], row["average_precision"]) == pytest.approx(
            (targets[:, column].sum(), own, precisions.get(column, row["average_precision"])), abs=1e-5, nan_ok=True
        )
        if validation_targets[:, column].any():
            *tried, at = (
                f1_score(validation_targets[:, column], validation[:, column] >= threshold, zero_division=0)
                for threshold in [*validation[:, column], 0.0, row["threshold"]]
            )
            assert at == pytest.approx(max(tried))


@pytest.mark.spark
@pytest.mark.timeout(280)
def test_it_is_recorded_in_a_child_run_and_in_the_run_of_the_training(
    measured: Any, logged: Any, artifact_text: Callable[[str, str, str], str]
) -> None:
    found, report = measured
    child = logged.client.get_run(found.run.run_id)
    assert child.data.tags["mlflow.parentRunId"] == logged.run_id
    scores = {f"test/{name}": value for name, value in found.metrics.items()}
    assert child.data.metrics == pytest.approx(scores)
    assert (child.info.run_name, child.info.status, child.data.params["split"]) == ("evaluate test", "FINISHED", "test")
    for name, score in scores.items():  # other tests evaluate the same model
        points = logged.client.get_metric_history(logged.run_id, name)
        assert pytest.approx(score) in [point.value for point in points]
        # Beside the validation of the same model, and not at the beginning of the training.
        assert {point.step for point in points} == {1}
    assert child.data.tags["mlflow.source.name"] == "groundswell evaluate"
    assert {"mlflow.user", "groundswell.version"} <= child.data.tags.keys()
    (dataset,) = child.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.tags[0].value) == ("bigearthnet_v2", "evaluation")
    assert {item.path for item in logged.client.list_artifacts(child.info.run_id)} == {
        "evaluation_test.html",
        "label_pairs_test.json",
        "per_class_test.json",
        "per_class_test.png",
        "reliability_test.json",
        "slices_test.json",
    }
    assert artifact_text(logged.store, child.info.run_id, "evaluation_test.html") == report.read_text()
    rows = rows_of(artifact_text(logged.store, child.info.run_id, "slices_test.json"))
    assert [
        sum(row["samples"] for row in rows if row["column"] == column) for column in ("country", "season", "tile")
    ] == [12, 12, 12]


@pytest.mark.spark
@pytest.mark.usefixtures("_scored_before")
def test_scores_of_another_dataset_stay_in_their_own_run_also_where_the_disk_takes_no_report(
    measured: Any, logged: Any, small_dataset: Path, edit_manifest: Callable[..., None], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(small_dataset, other)
    edit_manifest(other, lambda values: values.update(source_fingerprint="of another archive"))
    before = logged.client.get_metric_history(logged.run_id, "test/loss")
    with pytest.raises(RuntimeError, match=r"^evaluate\.report=/dev/full cannot be written \(No space left") as full:
        evaluate(config_of(other, "evaluate.report=/dev/full"), logged.uri)
    assert logged.client.get_metric_history(logged.run_id, "test/loss") == before
    own = logged.client.get_run(str(full.value).rpartition(" ")[2]).data.metrics
    assert own["test/loss"] == pytest.approx(measured[0].metrics["loss"], abs=1e-5)


@pytest.mark.spark
@pytest.mark.usefixtures("_scored_before")
def test_scores_of_a_model_whose_training_was_deleted_are_in_a_run_of_their_own(
    logged: Any, small_dataset: Path
) -> None:
    logged.client.delete_run(logged.run_id)
    try:
        found = evaluate(config_of(small_dataset, "tracking.experiment=of its own"), logged.uri)
    finally:
        logged.client.restore_run(logged.run_id)  # other tests need it
    stored = logged.client.get_run(found.run.run_id)
    assert logged.client.get_experiment(stored.info.experiment_id).name == "of its own"
    assert "mlflow.parentRunId" not in stored.data.tags
    assert stored.data.metrics["test/loss"] == pytest.approx(found.metrics["loss"])


@pytest.mark.usefixtures("_use_store")
def test_what_cannot_be_evaluated_is_found_out_before_spark_starts(
    logged: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs.evaluate, "spark_session", None)
    (tmp_path / "index.html").write_text("<html>mine</html>")
    for setting, message in (
        (f"evaluate.report={tmp_path}", "is a folder"),
        (f"evaluate.report={tmp_path}/missing/a.html", "there is no folder"),
        (f"evaluate.report={tmp_path}/index.html", "which groundswell has not written: move or remove index"),
        (
            f"evaluate.report={small_dataset}/report.html",
            f"would write into the dataset {small_dataset}, whose folder holds its own",
        ),
        ("training.metrics={own: {path: 'operator:add'}}", "operator:add"),
        ("training.metrics={own: {path: 'operator:ad'}}", "operator:ad"),
    ):
        with pytest.raises(ValueError, match=rf"^{setting.split('=')[0]}.* ?{message}"):
            evaluate(config_of(small_dataset, setting), logged.uri)


@pytest.mark.spark
@pytest.mark.usefixtures("_scored_before")
def test_scores_that_the_store_does_not_take_end_the_child_run(
    measured: Any, logged: Any, small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, gone = tmp_path / "report.html", Mock(side_effect=TrackingError("no answer from MLflow"))
    for place, fails, reason in (
        ("RunWriter.drain", lambda writer: "no answer within 4 s", "no answer within 4 s"),
        ("has_run", gone, "no answer from MLflow"),
    ):
        monkeypatch.setattr(f"jobs.shell.records.{place}", fails)
        with pytest.raises(TrackingError, match=rf"did not take the scores \({reason}\): loss .*, f1_micro \d"):
            evaluate(config_of(small_dataset, f"evaluate.report={report}"), logged.uri, "validation")
        assert "<html" in report.read_text()
        report.unlink()
    children = logged.client.search_runs(
        [logged.client.get_run(logged.run_id).info.experiment_id], f"tags.mlflow.parentRunId = '{logged.run_id}'"
    )
    ended = {(child.info.run_name, child.info.status) for child in children}
    assert ended >= {("evaluate test", "FINISHED"), ("evaluate validation", "FAILED")}


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
def test_scoring_takes_the_thresholds_that_were_tuned(measured: Any, logged: Any) -> None:
    tuned = tuple(row["threshold"] for row in measured[0].per_class)
    assert len(set(tuned)) > 1
    assert describe(find_model(logged.uri)).thresholds_or(None) == pytest.approx(tuned)


@pytest.mark.spark
@pytest.mark.timeout(280)
@pytest.mark.usefixtures("_use_store")
def test_scores_of_an_image_and_its_mirror_image_have_a_name_of_their_own(
    measured: Any, logged: Any, small_dataset: Path
) -> None:
    before = find_model(logged.uri).metadata.thresholds
    found = evaluate(config_of(small_dataset, "evaluate.test_time_augmentation=mirror", tuned=True), logged.uri)
    both = {name: (own + logged.mirrored[name]) / 2 for name, own in logged.expected.items()}
    loss, alone = found.metrics["loss"], measured[0].metrics["loss"]
    assert loss == pytest.approx(mean_loss(*truth(small_dataset, "test", both)), abs=1e-5)
    assert loss != pytest.approx(alone, abs=1e-5)

    child = logged.client.get_run(found.run.run_id)
    assert (child.info.run_name, child.data.params["test_time_augmentation"]) == ("evaluate test mirror", "mirror")
    parent = logged.client.get_run(logged.run_id).data.metrics
    assert (child.data.metrics["test_mirror/loss"], parent["test_mirror/loss"], parent["test/loss"]) == pytest.approx(
        (loss, loss, alone)
    )
    # Thresholds that suit the means are not those of single images, which `score` predicts.
    assert find_model(logged.uri).metadata.thresholds == before


@pytest.mark.spark
@pytest.mark.timeout(280)
@pytest.mark.usefixtures("_use_store")
def test_several_splits_are_measured_as_one_with_a_slice_each(
    logged: Any,
    small_dataset: Path,
    expected: Any,
    tmp_path: Path,
    artifact_text: Callable[[str, str, str], str],
) -> None:
    report, result = tmp_path / "report.html", tmp_path / "result.json"
    # By its name in the registry, where the other tests name the run.
    line = [
        *("evaluate", "--config", "smoke", "--model", "models:/scored/1", "--split", "train,test"),
        *("--result", str(result), "--set", "training.batch_size_per_worker=5"),
    ]
    for setting in (f"dataset.path={small_dataset}", f"evaluate.report={report}", "tracking.experiment=scoring"):
        line += ["--set", setting]
    assert cli.execute(line) == 0
    parts = {split: truth(small_dataset, split, expected) for split in ("test", "train")}
    parts["test-train"] = tuple(np.concatenate(both) for both in zip(*parts.values(), strict=True))
    wanted = {name: f1_score(own, predicted >= 0.5, average="micro") for name, (own, predicted) in parts.items()}
    metrics = json.loads(result.read_text())["metrics"]
    assert metrics["test-train/f1_micro"] == pytest.approx(wanted["test-train"])
    parent = logged.client.get_run(logged.run_id)
    assert parent.data.metrics.items() >= metrics.items()
    (child,) = logged.client.search_runs([parent.info.experiment_id], "attributes.run_name = 'evaluate test-train'")
    rows = rows_of(artifact_text(logged.store, child.info.run_id, "slices_test-train.json"))
    found = {row["value"]: (row["samples"], row["f1_micro"]) for row in rows if row["column"] == "split"}
    assert (found, sum(row["samples"] for row in rows if row["column"] == "country")) == (
        {name: (size, pytest.approx(wanted[name])) for name, size in (("train", 32), ("test", 12))},
        44,
    )
    page = report.read_text()
    assert ("Evaluation on test, train" in page, page.count("<img ")) == (True, 25)


@pytest.mark.spark
@pytest.mark.usefixtures("_scored_before")
def test_an_exported_model_is_evaluated_where_no_store_knows_it(
    logged: Any, small_dataset: Path, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.artifacts.download_artifacts(logged.uri, dst_path=str(tmp_path / "exported"), tracking_uri=logged.store)
    (exported,) = (path.parent for path in (tmp_path / "exported").rglob("MLmodel"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'elsewhere.db'}")
    metrics = evaluate(config_of(small_dataset), str(exported), "train").metrics
    targets, probabilities = truth(small_dataset, "train", expected)
    assert metrics["f1_micro"] == pytest.approx(f1_score(targets, probabilities >= 0.5, average="micro"))
    assert not any(name.endswith("_tuned") for name in metrics)


@pytest.mark.spark
@pytest.mark.usefixtures("_scored_before")
def test_curves_of_the_training_and_scores_of_other_weights_stay(
    logged: Any, small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded() -> dict[str, float]:
        return dict(logged.client.get_run(logged.run_id).data.metrics)

    before, config = recorded(), config_of(small_dataset)
    evaluate(config, logged.uri, "train")
    assert recorded() == before
    served = find_model(logged.uri)
    monkeypatch.setattr(
        jobs.evaluate, "find_model", lambda uri: replace(served, metadata=replace(served.metadata, ema=0.99))
    )
    scores = evaluate(config, logged.uri, "test").metrics
    assert recorded() == pytest.approx({**before, **{f"test_ema/{name}": value for name, value in scores.items()}})


def test_a_store_that_does_not_answer_is_one_line(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch, error_line: Callable[..., str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(jobs.evaluate, "spark_session", None)
    command = ("evaluate", "--config", "smoke", "--model", "runs:/0123456789abcdef0123456789abcdef/model")
    assert "no answer from MLflow at http:" in error_line(*command, settings=[f"dataset.path={small_dataset}"], code=4)


def made_up(dataset: Path, weight: float, noise: float) -> tuple[SplitReader, SplitScores]:
    """The training split, and scores of it that are better than chance."""
    reader = SplitReader(dataset, "train")
    targets, random = reader.gather(np.arange(len(reader))).targets, np.random.default_rng(0)
    probabilities = np.clip(targets * weight + random.random(targets.shape) * noise, 0, 1).astype(np.float32)
    return reader, SplitScores(reader.ids(), probabilities, targets)


def measured_of(reader: SplitReader, scores: SplitScores, columns: pa.Table, **more: Any) -> Measured:
    return measure(
        scores, class_names=reader.manifest.class_names, task="multi_label", columns=columns, own_metrics={}, **more
    )


def test_slices_and_pairs_are_those_of_their_samples(small_dataset: Path) -> None:
    reader, scores = made_up(small_dataset, 0.4, 0.6)
    targets, probabilities, names = scores.targets, scores.probabilities, reader.manifest.class_names
    columns, predicted = read_columns(Location.at(small_dataset), ["train"]), scores.probabilities >= 0.5
    found = measured_of(reader, scores, columns)
    for column in ("country", "season", "tile"):
        values = np.array(columns[column].to_pylist())
        rows = {each.value: each.as_row() for each in found.slices if each.column == column}
        assert (set(rows), len(rows) > 1) == (set(values), True), column
        for value, row in rows.items():
            chosen = values == value
            f1 = [f1_score(targets[chosen], predicted[chosen], average=each, zero_division=0) for each in F1]
            assert [row["samples"], *(row[f"f1_{each}"] for each in F1)] == pytest.approx([chosen.sum(), *f1])
    for row in found.pairs:
        missed, invented = (names.index(row[name]) for name in ("missed", "predicted"))
        both = (targets[:, missed] & ~predicted[:, missed]) & (
            predicted[:, invented] & ~targets[:, invented].astype(bool)
        )
        assert row["samples"] == both.sum() > 0
    losses = [log_loss(own, row, labels=[0, 1]) for own, row in zip(targets, probabilities, strict=True)]
    np.testing.assert_allclose(scores.losses("multi_label"), losses, rtol=1e-5)


def test_one_label_has_a_confusion_matrix_and_no_thresholds() -> None:
    random = np.random.default_rng(1)
    classes, probabilities = random.integers(0, 7, 200), random.dirichlet(np.ones(7), 200).astype(np.float32)
    scores = SplitScores([str(number) for number in range(200)], probabilities, np.eye(7, dtype=np.uint8)[classes])
    names = [f"class {number}" for number in range(7)]
    found = measure(
        scores, class_names=names, task="single_label", columns=pa.table({}), own_metrics={}, validation=scores
    )
    scored = {"top_1", "top_5", "f1_macro", "mean_average_precision"}
    assert set(found.metrics) == {"loss", *scored, "expected_calibration_error"}
    loss = log_loss(classes, probabilities)
    assert (found.metrics["loss"], scores.losses("single_label").mean()) == pytest.approx((loss, loss), rel=1e-5)
    assert (found.thresholds, found.metrics["top_1"]) == (None, (probabilities.argmax(1) == classes).mean())
    matrix = confusion_matrix(classes, probabilities.argmax(1))
    np.fill_diagonal(matrix, 0)
    pairs = {(names.index(row["missed"]), names.index(row["predicted"])): row["samples"] for row in found.pairs}
    assert pairs == {(row, column): matrix[row, column] for row, column in zip(*np.nonzero(matrix), strict=True)}


def test_the_best_and_the_worst_patches_are_those_of_the_smallest_and_the_largest_loss(small_dataset: Path) -> None:
    reader, scores = made_up(small_dataset, 0, 0)
    batch, ids = reader.gather(np.arange(len(reader))), reader.ids()
    # Every class of a patch is wrong by the same amount, so its loss is -log(1 - error).
    errors = np.random.default_rng(2).permutation(np.linspace(0.05, 0.45, len(ids)))
    scores = replace(scores, probabilities=np.abs(batch.targets - errors[:, np.newaxis]).astype(np.float32))
    page = evaluation_page(measured_of(reader, scores, pa.table({})), scores, [reader], "train", {})
    by_error = np.argsort(errors)
    for section, rows in (("best", by_error[:12]), ("worst", by_error[::-1][:12])):
        (content,) = re.findall(rf'<section id="{section}">(.*?)</section>', page, re.DOTALL)
        pixels = ({name: each[row] for name, each in batch.images.items()} for row in rows)
        pictures = [preview(images, reader.manifest.groups) for images in pixels]
        assert re.findall(r'<img src="(.*?)" alt="Patch (.*?)">', content) == list(
            zip(pictures, [ids[row] for row in rows], strict=True)
        )
        assert [float(loss) for loss in re.findall(r"loss ([\d.]+)</code>", content)] == pytest.approx(
            -np.log(1 - errors[rows]), abs=0.0006
        )


@pytest.mark.timeout(120)
def test_a_browser_shows_the_whole_report(show_page: Callable[..., Any], small_dataset: Path, tmp_path: Path) -> None:
    reader, scores = made_up(small_dataset, 0.5, 0.55)
    scores = replace(scores, ids=["<script>alert(1)</script>", *scores.ids[1:]])
    found = measured_of(reader, scores, read_columns(Location.at(small_dataset), ["train"]), validation=scores)
    page = evaluation_page(found, scores, [reader], "train", {"Model": "models:/land cover/3"})
    screenshot = Path(os.environ.get("GROUNDSWELL_SCREENSHOT", tmp_path / "page.png"))
    for width in (1280, 390):
        shown, _ = show_page(page, width, height=5200, screenshot=screenshot.with_stem(f"{screenshot.stem}-{width}"))
        assert len(shown["images"]) == page.count("<img ") == 25
        assert min(shown["images"]) >= 100
        assert (shown["overflow"], shown["scripts"]) == (0, 0)
