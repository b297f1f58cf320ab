"""The scores of a model on a labelled split: Spark tasks compute predictions, the driver measures them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyspark.sql import SparkSession
from scipy.sparse import csr_matrix

from models.calibration import Reliability, best_thresholds, multi_label_reliability, single_label_reliability
from models.metrics import (
    ClassScores,
    Metric,
    classification_scores,
    f1_macro,
    f1_micro,
    multi_label_counts,
    per_class_table,
)
from pipelines.dataset.format.manifest import read_manifest
from pipelines.sample import Task
from pipelines.scoring.predict.model import DEFAULT_THRESHOLD, ModelDescription, predicted_classes
from pipelines.scoring.predict.predictor import SentModel
from pipelines.scoring.predict.symmetries import Symmetries, averaged
from pipelines.scoring.source import Part, Source
from pipelines.spark.connect import sent
from pipelines.spark.tasks import run_tasks
from pipelines.storage.folder import Location

SLICES = ("country", "season", "tile")
"""Plain columns of a dataset; scores are also measured for each of their values."""
_LEAST = 1e-7
_PAIRS = 100


@dataclass(frozen=True)
class SplitScores:
    """Predictions of a model for every sample of a split, in row order."""

    ids: list[str]
    probabilities: NDArray[np.float32]
    """Predicted probabilities, `(samples, classes)`."""
    targets: NDArray[np.uint8]
    """Multi-hot, `(samples, classes)`."""

    def losses(self, task: Task) -> NDArray[np.float64]:
        """Return the cross-entropy of each sample, `(samples,)`: the mean over classes, or that of the right one."""
        known = np.clip(self.probabilities.astype(np.float64), _LEAST, 1 - _LEAST)
        if task == "single_label":
            return np.asarray(-np.log(known[self.targets > 0]))
        return np.asarray(-np.where(self.targets > 0, np.log(known), np.log(1 - known)).mean(axis=1))


class SliceScores(NamedTuple):
    """Scores of the samples with one value in a column."""

    column: str
    value: str
    samples: int
    metrics: dict[str, float]

    def as_row(self) -> dict[str, str | int | float]:
        """Return all scores as one row of a table."""
        return {"column": self.column, "value": self.value, "samples": self.samples, **self.metrics}


@dataclass(frozen=True)
class Measured:
    """All measurements of one split."""

    metrics: dict[str, float]
    """Scores by the names of `pipelines.tracking.metrics`, without the split."""
    per_class: list[ClassScores]
    """Scores of each class, with the class's best threshold where it was tuned."""
    reliability: Reliability
    thresholds: NDArray[np.float64] | None
    """Threshold of each class, tuned on validation; None if not tuned."""
    slices: list[SliceScores]
    """Scores by column; within a column the most frequent value comes first."""
    pairs: list[dict[str, str | int]]
    """Confused labels, the most frequent pair first: one was missed, and the other was predicted instead."""


def _collect(
    model: SentModel, symmetries: Symmetries | None, part: Part
) -> tuple[list[str], bytes, bytes, list[dict[str, str]]]:
    """Score one part on an executor: return ids, probabilities, targets and rejected samples."""
    predict = averaged(model.load(), symmetries)
    ids: list[str] = []
    probabilities, targets, rejected = [], [], []
    for batch in part.batches(model.batch_size):
        rejected += batch.rejected
        if batch.targets is not None:
            ids += batch.known["id"].to_pylist()
            probabilities.append(predict(batch.images)[: len(batch.known)])
            targets.append(batch.targets)
    return ids, b"".join(map(bytes, probabilities)), b"".join(map(bytes, targets)), rejected


def collect_scores(
    spark: SparkSession,
    model: ModelDescription,
    file: bytes,
    source: Source,
    *,
    batch_size: int,
    threads: int | None,
    symmetries: Symmetries | None = None,
) -> SplitScores:
    """Score all samples of a labelled source, with as many parallel tasks as Spark has slots.

    The model is sent to the executors, which need no access to MLflow.

    Args:
        spark: The session.
        model: Description of the model.
        file: The model's `.keras` file.
        source: Source of a prepared dataset.
        batch_size: Number of samples that the model gets at a time.
        threads: Number of threads of one task; None: the cores of the Spark task.
        symmetries: Symmetries over which each sample's probabilities are averaged; None: only the sample itself.

    Raises:
        ValueError: A row is damaged, or the model returns numbers that are not finite; the message names a sample.
        RuntimeError: Spark gave up.
    """
    with sent(spark, file) as weights:
        found = run_tasks(
            spark,
            list(source.parts),
            partial(_collect, SentModel(model, weights, batch_size, threads), symmetries),
            job="evaluate",
            folder=Location.at(source.where),
            files=[part.file for part in source.parts],
            less_memory="a smaller training.batch_size_per_worker",
            writes=False,
        )
    rejected = [row for *_, rows in found for row in rows]
    if rejected:
        raise ValueError(rejected[0]["detail"] or f"{rejected[0]['file']}: {rejected[0]['reason']}")
    classes = len(model.class_names)
    ids = [name for names, *_ in found for name in names]
    probabilities = np.frombuffer(b"".join(part[1] for part in found), np.float32).reshape(-1, classes)
    targets = np.frombuffer(b"".join(part[2] for part in found), np.uint8).reshape(-1, classes)
    finite = np.isfinite(probabilities).all(axis=1)
    if not finite.all():
        raise ValueError(
            f"{model.uri} gives probabilities that are not finite for {int((~finite).sum())} samples, the first is "
            f"{ids[int(np.argmin(finite))]}"
        )
    return SplitScores(ids, probabilities, targets)


def measure(
    scores: SplitScores,
    *,
    class_names: Sequence[str],
    task: Task,
    columns: pa.Table,
    own_metrics: Mapping[str, Metric],
    validation: SplitScores | None = None,
) -> Measured:
    """Measure a split.

    Args:
        scores: Predictions of its samples.
        class_names: Names of the classes, in the order of the probabilities.
        task: Task, which decides the kinds of scores.
        columns: Metadata of the samples, row by row, from `read_columns`.
        own_metrics: Further metrics by name.
        validation: Predictions for the validation split, which tune the thresholds of a multi-label model; None: all
            thresholds are `DEFAULT_THRESHOLD`.
    """
    found = classification_scores(scores.probabilities, scores.targets, task)
    metrics, precisions = {"loss": float(scores.losses(task).mean()), **found.metrics}, found.average_precisions
    reliability = (multi_label_reliability if task == "multi_label" else single_label_reliability)(
        scores.probabilities, scores.targets
    )
    metrics["expected_calibration_error"] = reliability.expected_error
    per_class = per_class_table(class_names, found.counts, precisions)
    thresholds = None
    if validation is not None and task == "multi_label":
        thresholds = best_thresholds(validation.probabilities, validation.targets, DEFAULT_THRESHOLD)
        tuned = multi_label_counts(scores.probabilities, scores.targets, thresholds)
        metrics |= {"f1_micro_tuned": f1_micro(tuned), "f1_macro_tuned": f1_macro(tuned)}
        rows = per_class_table(class_names, tuned, precisions)
        per_class = [
            {**row, "threshold": float(threshold), "f1_tuned": better["f1"]}
            for row, better, threshold in zip(per_class, rows, thresholds, strict=True)
        ]
    metrics |= {name: metric(scores.targets, scores.probabilities) for name, metric in own_metrics.items()}
    pairs = _pairs(scores, task, class_names, DEFAULT_THRESHOLD if thresholds is None else thresholds)
    return Measured(metrics, per_class, reliability, thresholds, _slices(scores, task, columns), pairs)


def read_columns(dataset: Location, splits: Sequence[str]) -> pa.Table:
    """Read the metadata of the samples of some splits, in row order; with several splits also the split's name."""
    manifest, tables = read_manifest(dataset), []
    for split in splits:
        for shard in manifest.splits[split].shards:
            with dataset.open(shard.file) as file, pq.ParquetFile(file) as parquet:
                table = parquet.read(columns=list(SLICES))
            if len(splits) > 1:
                table = table.append_column("split", pa.repeat(split, shard.rows))
            tables.append(table)
    return pa.concat_tables(tables) if tables else pa.table({})


def _slices(scores: SplitScores, task: Task, columns: pa.Table) -> list[SliceScores]:
    """Measure each value of each column, the most frequent value first; unknown values are left out."""
    rows: list[SliceScores] = []
    for name in columns.column_names:
        values = columns[name].combine_chunks()
        found = []
        for value in pc.unique(values.drop_null()).to_pylist():
            chosen = pc.fill_null(pc.equal(values, value), False).to_numpy(zero_copy_only=False)
            metrics = classification_scores(scores.probabilities[chosen], scores.targets[chosen], task).metrics
            found.append(SliceScores(name, value, int(chosen.sum()), metrics))
        rows += sorted(found, key=lambda row: (-row.samples, row.value))
    return rows


def _pairs(
    scores: SplitScores, task: Task, class_names: Sequence[str], thresholds: float | NDArray[np.float64]
) -> list[dict[str, str | int]]:
    present = scores.targets > 0
    predicted = predicted_classes(scores.probabilities, task, thresholds)
    # A sample has few missed and few invented classes, so almost all of the products are zero.
    missed, invented = (
        csr_matrix(present & ~predicted, dtype=np.int64),
        csr_matrix(predicted & ~present, dtype=np.int64),
    )
    counts = (missed.T @ invented).tocoo()
    order = np.lexsort((counts.col, counts.row, -counts.data))[:_PAIRS]
    return [
        {"missed": class_names[one], "predicted": class_names[other], "samples": int(samples)}
        for one, other, samples in zip(counts.row[order], counts.col[order], counts.data[order], strict=True)
    ]
