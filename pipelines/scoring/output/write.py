"""One part of the predictions, written atomically by one Spark task."""

import json
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import BadRecordError
from pipelines.dataset.prepare.shard import rejection
from pipelines.machine.json_text import parse_json
from pipelines.sample import Task
from pipelines.scoring.output.output import DELTA_LOG_FILE, NOT_FINITE, WrittenPart, write_note
from pipelines.scoring.predict.model import predicted_classes
from pipelines.scoring.predict.predictor import Predict, SentModel, predictor, task_threads
from pipelines.scoring.predict.processor import Runtime, used_features, why_unusable
from pipelines.scoring.source import KNOWN_SCHEMA, Part, SampleBatch
from pipelines.spark.connect import SentFile
from pipelines.storage.folder import Location

_ROWS_PER_GROUP = 8192

PREDICTION_SCHEMA = pa.schema(
    [
        *KNOWN_SCHEMA,
        pa.field("probabilities", pa.list_(pa.field("item", pa.float32(), nullable=False)), nullable=False),
        pa.field("labels", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
        pa.field("model_version", pa.string(), nullable=False),
    ]
)
"""Columns of the predictions. `probabilities` have the order of the model's classes (`class_names` in
`predictions.json`), `labels` are the names of the predicted ones."""


class _LostRowsError(Exception):
    """Samples that were scored before can no longer be read."""


@dataclass(frozen=True)
class Scorer:
    """Everything that a task needs beside its part; it is sent to the executors."""

    model: SentModel
    runtime: Runtime
    converted: SentFile | None
    """Input of `convert.load_converted`; None with Keras."""
    converted_digest: str
    """Identifier of the converted model among others of the same model."""
    output: Location
    thresholds: tuple[float, ...]
    schema: pa.Schema = PREDICTION_SCHEMA
    """Columns of the predictions; the user's own follow ours."""

    def write(self, part: Part, before: WrittenPart | None = None) -> WrittenPart:
        """Score a part, write its file and its marker.

        Attempts of the same task may overlap: each writes its own file, which gets the name atomically.

        Args:
            part: Part to score.
            before: Finished part that is scored again. It stays if some of its samples can no longer be read.

        Returns:
            The result in the file: the new part, or the one before.

        Raises:
            OSError, RuntimeError: Input or output cannot be used.
        """
        predict, used = self._load()
        try:
            with self.output.new_file(part.file) as path:
                with pq.ParquetWriter(path, self.schema, compression="zstd") as writer:
                    rows, rejected = self._write_batches(part, predict, writer)
                written = WrittenPart(part.file, rows, path.stat().st_size, rejected, used)
                # Before the file gets its name: no sample of an earlier part may be lost, if that part's file is whole.
                if (
                    before is not None
                    and not {*written.unread} <= {*before.unread}
                    and self.output.size(before.file) == before.size
                ):
                    raise _LostRowsError
            written = replace(written, sizes_digest=part.digest_of_sizes(written.unread))
        except _LostRowsError:
            assert before is not None
            written = before
        write_note(written, self.output)
        return written

    def _load(self) -> tuple[Predict, str]:
        """Return this process's model, and what computes it here; Keras where the processor lacks what is needed."""
        reason = why_unusable(self.runtime)
        converted, threads = self.converted, task_threads(self.model.threads)
        if converted is not None and reason is None:
            from pipelines.scoring.predict.convert import load_converted

            loaded = predictor(
                f"{self.model.description.model_id} {self.converted_digest}",
                lambda: load_converted(
                    self.model.description, converted.value, self.runtime, self.model.batch_size, threads
                ),
                self.model.batch_size,
                threads,
            )
            return loaded, f"OpenVINO {self.runtime} with {', '.join(used_features(self.runtime))}"
        return self.model.load(), "Keras" if reason is None else f"Keras, as on {socket.gethostname()} {reason}"

    def _write_batches(
        self, part: Part, predict: Predict, writer: pq.ParquetWriter
    ) -> tuple[int, list[dict[str, str]]]:
        """Write the predictions of a part; return their number, and the rejected samples."""
        rejected: list[dict[str, str]] = []

        def predictions() -> Iterator[pa.Table]:
            for batch in part.batches(self.model.batch_size):
                rejected.extend(batch.rejected)
                if len(batch.known):
                    table, not_finite = self._predictions(batch, predict(batch.images), part.file)
                    rejected.extend(not_finite)
                    yield table

        return write_row_groups(predictions(), writer, _ROWS_PER_GROUP), rejected

    def _predictions(
        self, batch: SampleBatch, probabilities: NDArray[np.float32], file: str
    ) -> tuple[pa.Table, list[dict[str, str]]]:
        """Return the predictions of a batch, and the samples whose predictions are not finite numbers."""
        model = self.model.description
        finite = np.isfinite(probabilities[: len(batch.known)]).all(axis=1)
        ids = batch.known["id"].filter(pa.array(~finite)).to_pylist()
        rejected = [rejection(name, BadRecordError(file, NOT_FINITE)) for name in ids]
        known, probabilities = batch.known.filter(pa.array(finite)), probabilities[: len(finite)][finite]
        columns = {
            **{name: known[name] for name in known.column_names},
            "probabilities": as_lists(probabilities, PREDICTION_SCHEMA.field("probabilities").type),
            "labels": label_names(probabilities, model.class_names, model.task, self.thresholds),
            "model_version": pa.repeat(model.version, len(known)),
        }
        return pa.table(columns, schema=self.schema), rejected


def write_row_groups(tables: Iterable[pa.Table], writer: pq.ParquetWriter, rows_per_group: int) -> int:
    """Write tables as row groups of at least `rows_per_group` rows, except the last one; return the number of rows."""
    waiting: list[pa.Table] = []
    rows = 0
    for table in tables:
        waiting.append(table)
        rows += len(table)
        if sum(map(len, waiting)) >= rows_per_group:
            writer.write_table(pa.concat_tables(waiting).combine_chunks())
            waiting.clear()
    if waiting:
        writer.write_table(pa.concat_tables(waiting).combine_chunks())
    return rows


def as_lists(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return an array `(rows, numbers)` as one list of this type per row, without a copy."""
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), flat).cast(kind)


def label_names(
    probabilities: NDArray[np.float32], class_names: tuple[str, ...], task: Task, thresholds: tuple[float, ...]
) -> pa.Array:
    """Return the names of the predicted classes as one list per row."""
    predicted = predicted_classes(probabilities, task, thresholds)
    offsets = np.concatenate([[0], np.cumsum(predicted.sum(axis=1))]).astype(np.int32)
    names = pa.array(class_names, pa.string()).take(pa.array(np.nonzero(predicted)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), names).cast(PREDICTION_SCHEMA.field("labels").type)


def write_delta_log(output: Location, parts: Sequence[WrittenPart], schema: pa.Schema, description: str) -> None:
    """Make a folder of predictions a Delta table, of protocol version 1 for readers and 2 for writers.

    Kept timestamps without a time zone need versions 3 and 7.

    The log is made in a temporary folder and written like every other file here: atomically, with the storage's own
    credentials. Delta's own commit needs a rename that fails if the name exists, which not every storage has.

    Args:
        output: Folder of the predictions.
        parts: All parts of the predictions, which are the files of the table.
        schema: Columns of the predictions.
        description: Description of the table.
    """
    from deltalake import Schema
    from deltalake.transaction import AddAction, create_table_with_add_actions

    now = int(time.time() * 1000)
    actions = [
        AddAction(part.file, part.size, {}, now, True, json.dumps({"numRecords": part.rows}))
        for part in parts
        if part.rows
    ]
    with tempfile.TemporaryDirectory(prefix="groundswell-") as temporary:
        create_table_with_add_actions(
            temporary, Schema.from_arrow(schema), actions, name="predictions", description=description
        )
        lines = Path(temporary, DELTA_LOG_FILE).read_text().splitlines()
    committed = parse_json(lines[0])
    committed["commitInfo"]["operationParameters"]["location"] = str(output)
    output.make(str(PurePosixPath(DELTA_LOG_FILE).parent))
    output.write(DELTA_LOG_FILE, "\n".join([json.dumps(committed), *lines[1:], ""]).encode())
