"""The extraction of all samples' features by Spark tasks, once per model and dataset; finished files are kept.

It needs a head in the model's file, which is checked without TensorFlow.
"""

import io
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from pipelines.machine.json_text import parse_json
from pipelines.probing.features import SCHEMA, FeatureFile, Features, Identity, clean_up, find_features, finish
from pipelines.scoring.output.write import as_lists, write_row_groups
from pipelines.scoring.predict.model import ModelDescription
from pipelines.scoring.predict.predictor import Predict, SentModel, load_keras, predictor, task_threads
from pipelines.scoring.source import DatasetPart, SampleBatch, Source
from pipelines.spark.connect import sent
from pipelines.spark.tasks import run_until_done, watched
from pipelines.storage.folder import Location
from pipelines.storage.inventory import complete_files, is_leftover
from pipelines.storage.lock import hold, tidy

_SHARE = "set probe.output to a folder on storage that all hosts mount, or a URL"
_ROWS_PER_GROUP = 1024


@dataclass(frozen=True)
class _Extracted:
    """The result of one part."""

    file: FeatureFile | None
    problem: str = ""
    """Reason why there is no file."""


@dataclass(frozen=True)
class Extractor:
    """The data that a task needs in addition to its part; it is sent to the executors."""

    model: SentModel
    folder: Location

    def extract(self, part: DatasetPart) -> _Extracted:
        """Write the features of one shard; a damaged sample or a non-finite number leaves no file.

        Attempts of the same task may run at the same time: each writes its own file and renames it atomically.

        Raises:
            OSError, RuntimeError: The dataset or the folder cannot be used.
        """
        if self.folder.is_local and not self.folder.path.is_dir():  # the driver has made it
            return _Extracted(None, f"an executor does not see {self.folder}, which the driver has made: {_SHARE}")
        predict = self._load()
        try:
            with self.folder.new_file(part.file) as path:
                with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
                    tables = (self._table(batch, predict) for batch in part.batches(self.model.batch_size))
                    write_row_groups(tables, writer, _ROWS_PER_GROUP)
                size = path.stat().st_size
        except _UnusableSampleError as error:
            return _Extracted(None, str(error))
        return _Extracted(FeatureFile(part.file, part.split, part.rows, size))

    def _load(self) -> Predict:
        def load() -> Predict:
            from models.networks.features import features_and_outputs

            of_model = partial(features_and_outputs, classes=len(described.class_names))
            return load_keras(described, self.model.file.value, self.model.batch_size, threads, of_model)

        described = self.model.description
        threads = task_threads(self.model.threads)
        return predictor(f"{described.model_id} features", load, self.model.batch_size, threads)

    def _table(self, batch: SampleBatch, predict: Predict) -> pa.Table:
        if batch.rejected or batch.targets is None:
            row = batch.rejected[0]
            raise _UnusableSampleError(row["detail"] or f"{row['file']}: {row['reason']}")
        found, classes = predict(batch.images)[: len(batch.known)], len(self.model.description.class_names)
        finite = np.isfinite(found).all(axis=1)
        if not finite.all():
            name = batch.known["id"][int(np.argmin(finite))].as_py()
            raise _UnusableSampleError(
                f"{self.model.description.uri} gives features that are not finite for the sample {name}"
            )
        columns = {
            "id": batch.known["id"],
            "features": as_lists(found[:, :-classes], SCHEMA.field("features").type),
            "probabilities": as_lists(found[:, -classes:], SCHEMA.field("probabilities").type),
            "targets": as_lists(batch.targets, SCHEMA.field("targets").type),
        }
        return pa.table(columns, schema=SCHEMA)


class _UnusableSampleError(Exception):
    """The error when a sample has no features."""


def extract_features(
    spark: SparkSession,
    model: ModelDescription,
    file: bytes,
    source: Source,
    folder: Location,
    identity: Identity,
    *,
    batch_size: int,
    threads: int | None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Features:
    """Return the features of a labelled source: the finished ones of a folder, or new ones.

    Finished files of an interrupted extraction are kept, and only the others are written.

    Args:
        spark: Session whose executors see the dataset and the folder.
        model: Inputs and outputs of the model.
        file: Its `.keras` file, which is sent to the executors.
        source: Source of a prepared dataset.
        folder: Folder for only these features.
        identity: Facts that determine the features.
        batch_size: Samples in one batch of the model.
        threads: Threads of one task; None: the cores of the Spark task.
        say: Called with each line about what happens.
        progress: Called about once a second from another thread with the samples in finished files and in all files.

    Raises:
        ValueError: A row is damaged, or the model returns non-finite numbers; the text names a sample.
        RuntimeError: Another job extracts the same features, Spark gave up, or the driver does not see the files of
            the executors.
    """
    parts = {part.file: part for part in source.parts if isinstance(part, DatasetPart)}
    if (features := find_features(folder, identity, parts)) is not None:
        tidy(folder, partial(clean_up, folder, parts), has_leftovers=any(map(is_leftover, folder.names())))
        say(f"the features in {folder} are used again")
        return features
    with hold(folder) as check_owner:
        folder.make()
        found = _finished(folder, parts, list(parts))
        total = sum(part.rows for part in parts.values())
        left = total - sum(each.file.rows for each in found.values() if each.file is not None)
        say(f"extracting the features of {left:,} of {total:,} samples into {folder}")

        def look() -> None:
            names = set(folder.names())
            progress(sum(part.rows for name, part in parts.items() if name in names), total)

        with sent(spark, file) as weights, watched(look, name="groundswell-probe-progress"):
            found |= run_until_done(
                spark,
                {name: part for name, part in parts.items() if name not in found},
                Extractor(SentModel(model, weights, batch_size, threads), folder).extract,
                finished=partial(_finished, folder, parts),
                say=say,
                job="probe",
                folder=folder,
                less_memory="a smaller training.batch_size_per_worker",
            )
        if problems := [each.problem for each in found.values() if each.problem]:
            raise ValueError(problems[0])
        files = [each.file for name in parts if (each := found[name]).file is not None]
        seen = complete_files(folder, {file.file: file.size for file in files})
        if missing := [file.file for file in files if file.file not in seen]:
            raise RuntimeError(
                f"an executor has written {missing[0]}, which the driver does not see in {folder}: {_SHARE}"
            )
        check_owner()
        return finish(folder, identity, files)


def _finished(folder: Location, parts: dict[str, DatasetPart], files: list[str]) -> dict[str, _Extracted]:
    """Find the files of an earlier attempt that are readable and have all their rows."""
    found = {}
    for name, is_folder, size in folder.entries():
        if is_folder or name not in files:
            continue
        try:
            with folder.open(name) as file, pq.ParquetFile(file) as parquet:
                rows, schema = parquet.metadata.num_rows, parquet.schema_arrow
        except (pa.ArrowException, OSError):
            continue
        if rows == parts[name].rows and schema.names == SCHEMA.names:
            found[name] = _Extracted(FeatureFile(name, parts[name].split, rows, size))
    return found


def check_head(file: bytes, classes: int, uri: str) -> None:
    """Make sure that a model has a dense layer, or a convolution of one pixel, with one unit for each of its classes.

    Args:
        file: Content of the `.keras` file.
        classes: Number of the model's classes.
        uri: URI of the model, for the message.

    Raises:
        ValueError: The model has no such layer, or the file is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            described = parse_json(archive.read("config.json"))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{uri}: its .keras file is damaged ({error})") from None
    if classes not in _units(described):
        raise ValueError(
            f"{uri} has no dense layer with {classes} units, one for each of its classes, and no such convolution of "
            "one pixel: the features of a probe are the input of such a layer"
        )


def _units(value: Any) -> Iterator[int]:
    """Yield the units of all layers that `models.networks.features` accepts as a head, also in nested models."""
    if isinstance(value, dict):
        kind, config = value.get("class_name"), value.get("config") or {}
        if kind == "Dense":
            yield int(config["units"])
        elif kind == "Conv2D" and config["data_format"] == "channels_last" and list(config["kernel_size"]) == [1, 1]:
            yield int(config["filters"])
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _units(each)
