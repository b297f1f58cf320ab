"""Applies a model to a Spark DataFrame with a dataset's columns, batch or streaming.

`score_frame` is a function of DataFrames. `predict_udf` is for `select` and for SQL:

    from pipelines.scoring import predict_udf

    spark.udf.register("predict", predict_udf(spark, "models:/landcover@champion"))
    spark.sql("select id, predict(bands_10m, bands_20m, bands_60m) from patches")

`flat_columns` is for functions that take arrays of numbers, such as MLflow's:

    predict = mlflow.pyfunc.spark_udf(spark, "models:/landcover@champion", result_type="array<float>")
    flat_columns(frame, "models:/landcover@champion").select("id", predict("bands_10m", "bands_20m", "bands_60m"))

Each loads the model once in a Python worker and gives it batches of one size. Spark's own Arrow batches are larger:
`spark.sql.execution.arrow.maxRecordsPerBatch`, 10,000 rows by default, is 1.6 GB of patches of 160 kB; set it to 256.

A row whose image is missing or has another size ends the query with an error that names the column. A DataFrame
cannot hold rejected rows, unlike the files of `groundswell score`, so filter such rows before. The query also ends if
an executor has other code of this project than the driver.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession

from conf.sections.score import ScoreConfig
from pipelines.dataset.format.encoding import array_bytes, encoded
from pipelines.dataset.format.rows import Fields
from pipelines.machine.versions import check_this_executor, imported_version
from pipelines.scoring.output.write import PREDICTION_SCHEMA, as_lists, label_names
from pipelines.scoring.predict.model import describe
from pipelines.scoring.predict.predictor import Predict, SentModel
from pipelines.spark.columns import map_columns, quoted, select_columns
from pipelines.spark.connect import send
from pipelines.tracking.store.served import find_model, read_model_file

if TYPE_CHECKING:
    import pandas as pd

_RESULTS = ("probabilities", "labels", "model_version")
OWN_VERSION = imported_version()
"""Version and code of this project on the driver; executors must have the same."""


@dataclass(frozen=True)
class _Sent(SentModel):
    """A model for executors that may have other code than the driver."""

    code: str
    """Version and code of this project on the driver."""

    @property
    def fields(self) -> Fields:
        """Shape and dtype of every image column."""
        return {each.name: (each.shape, np.dtype(each.dtype)) for each in self.description.inputs}

    def load(self) -> Predict:
        """Return this process's model; raise RuntimeError if its code differs from the driver's."""
        check_this_executor(self.code)
        return super().load()


def score_frame(
    frame: DataFrame,
    model_uri: str,
    *,
    keep: Sequence[str] = ("id",),
    threshold: float | None = None,
    batch_size: int = ScoreConfig.default("batch_size"),
    threads: int | None = None,
) -> DataFrame:
    """Predict every row: the result has its kept columns, `probabilities`, `labels` and `model_version`.

    Args:
        frame: A DataFrame with the image groups of a dataset's shards as binary columns; it may be streaming.
        model_uri: A model's address, in one of the spellings that `tracking.served.find_model` takes.
        keep: Columns of the frame that the result copies.
        threshold: Least probability of a predicted label of a multi-label model; None: those of the model, or 0.5.
        batch_size: Number of samples that the model gets at a time.
        threads: Number of threads of one task; None: the cores of the Spark task.

    Raises:
        ValueError: The model does not exist, or the frame lacks one of its columns.
        RuntimeError: The tracking server cannot be reached.
    """
    sent = _send(frame.sparkSession, model_uri, batch_size, threads)
    inputs = [each.name for each in sent.description.inputs]
    kept = _kept_columns(frame, keep, inputs, _RESULTS)
    thresholds = sent.description.thresholds_or(threshold)
    schema = ", ".join([*kept, "probabilities array<float>", "labels array<string>", "model_version string"])

    def score(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        predict, known = sent.load(), sent.description
        for table, images in fixed_batches(batches, sent.fields, keep, sent.batch_size):
            probabilities = predict(images)[: len(table)]
            values = [
                as_lists(probabilities, PREDICTION_SCHEMA.field("probabilities").type),
                label_names(probabilities, known.class_names, known.task, thresholds),
                pa.repeat(known.version, len(table)),
            ]
            for name, value in zip(_RESULTS, values, strict=True):
                table = table.append_column(PREDICTION_SCHEMA.field(name).with_nullable(True), value)
            yield from table.combine_chunks().to_batches()

    return map_columns(frame, list(dict.fromkeys((*keep, *inputs))), score, schema)


def fixed_batches(
    batches: Iterator[pa.RecordBatch], fields: Fields, keep: Sequence[str], batch_size: int
) -> Iterator[tuple[pa.Table, Mapping[str, NDArray[Any]]]]:
    """Cut Arrow batches of any sizes into batches of one size; pixels are copied once, out of Arrow's memory.

    Args:
        batches: Record batches with the image columns as a dataset stores them.
        fields: Shape and dtype of the image columns.
        keep: Further columns to keep.
        batch_size: Number of samples of a batch; the last one is padded.

    Returns:
        The kept columns of the samples, and their images `(batch size, height, width, bands)`.

    Raises:
        ValueError: A value is missing, is no array, or has another shape or dtype.
    """
    images = {name: np.zeros((batch_size, *shape), dtype) for name, (shape, dtype) in fields.items()}
    waiting: list[pa.Table] = []
    filled = 0
    for batch in batches:
        source = pa.Table.from_batches([batch])
        table = encoded(source, fields)
        pixels = {
            name: array_bytes(table[name].combine_chunks(), shape, dtype).view(dtype).reshape(len(source), *shape)
            for name, (shape, dtype) in fields.items()
        }
        start = 0
        while start < len(source):
            count = min(batch_size - filled, len(source) - start)
            for name, values in pixels.items():
                images[name][filled : filled + count] = values[start : start + count]
            waiting.append(source.select(list(keep)).slice(start, count))
            filled, start = filled + count, start + count
            if filled == batch_size:
                yield pa.concat_tables(waiting), images
                waiting, filled = [], 0
    if filled:
        yield pa.concat_tables(waiting), images


def predict_udf(
    spark: SparkSession,
    model_uri: str,
    *,
    batch_size: int = ScoreConfig.default("batch_size"),
    threads: int | None = None,
) -> Callable[..., Any]:
    """Make a function of columns for `select` and, when registered, for SQL; it returns each row's probabilities.

    It takes the model's image groups in the order of its inputs, as a dataset stores them (binary).

    Args:
        spark: The session.
        model_uri: A model's address, in one of the spellings that `tracking.served.find_model` takes.
        batch_size: Number of samples that the model gets at a time.
        threads: Number of threads of one task; None: the cores of the Spark task.

    Raises:
        ValueError: The model does not exist.
        RuntimeError: The tracking server cannot be reached.
    """
    from pyspark.sql.pandas.functions import pandas_udf

    sent = _send(spark, model_uri, batch_size, threads)

    def predict(parts: Iterator[tuple["pd.Series[Any]", ...]]) -> Iterator["pd.Series[Any]"]:
        import pandas

        run, fields = sent.load(), sent.fields
        for given in parts:
            columns = given if isinstance(given, tuple) else (given,)
            found: list[NDArray[np.float32]] = []
            batch = pa.RecordBatch.from_arrays([pa.array(column, pa.binary()) for column in columns], list(fields))
            for table, images in fixed_batches(iter([batch]), fields, (next(iter(fields)),), sent.batch_size):
                found += list(run(images)[: len(table)])
            yield pandas.Series(found)

    predict.__annotations__ = _annotations(len(sent.description.inputs))
    function: Callable[..., Any] = pandas_udf(predict, "array<float>")  # type: ignore[call-overload]
    return function


def flat_columns(frame: DataFrame, model_uri: str, *, keep: Sequence[str] = ("id",)) -> DataFrame:
    """Convert image columns to arrays of numbers, the input of `mlflow.pyfunc.spark_udf` and `predict_batch_udf`.

    The numbers of an image `(height, width, bands)` are in C order. Integers become signed 32-bit, because Spark has no
    unsigned type. Others, such as the backscatter of Sentinel-1, become 32-bit floats.

    Args:
        frame: A DataFrame with the image groups of a dataset's shards as binary columns.
        model_uri: A model's address, in one of the spellings that `tracking.served.find_model` takes.
        keep: Columns of the frame that the result copies.

    Raises:
        ValueError: The model does not exist, or the frame lacks one of its columns.
        RuntimeError: The tracking server cannot be reached.
    """
    fields: Fields = {each.name: (each.shape, np.dtype(each.dtype)) for each in describe(find_model(model_uri)).inputs}
    kept = _kept_columns(frame, keep, list(fields), list(fields))
    types = {name: "float" if dtype.kind == "f" else "int" for name, (_, dtype) in fields.items()}
    schema = ", ".join([*kept, *(f"{quoted(name)} array<{kind}>" for name, kind in types.items())])
    code = OWN_VERSION

    def flatten(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_this_executor(code)
        for batch in batches:
            yield from flattened(batch, fields, keep).combine_chunks().to_batches()

    return map_columns(frame, [*keep, *fields], flatten, schema)


def flattened(batch: pa.RecordBatch, fields: Fields, keep: Sequence[str]) -> pa.Table:
    """Convert the image columns of a batch to lists of numbers; see `flat_columns`."""
    source = pa.Table.from_batches([batch])
    table, result = encoded(source, fields), source.select(list(keep))
    for name, (shape, dtype) in fields.items():
        kind = np.float32 if dtype.kind == "f" else np.int32
        numbers = array_bytes(table[name].combine_chunks(), shape, dtype).view(dtype).astype(kind)
        result = result.append_column(name, as_lists(numbers, pa.list_(pa.from_numpy_dtype(numbers.dtype))))
    return result


def _send(spark: SparkSession, model_uri: str, batch_size: int, threads: int | None) -> _Sent:
    served = find_model(model_uri)
    return _Sent(describe(served), send(spark, read_model_file(served)), batch_size, threads, OWN_VERSION)


def _kept_columns(frame: DataFrame, keep: Sequence[str], inputs: Sequence[str], results: Sequence[str]) -> list[str]:
    """Check the columns of a frame and of the result, and return the kept ones as parts of a schema."""
    if not keep:
        raise ValueError("keep=() would tell of no result to which row it belongs: name a column, such as id")
    chosen = select_columns(frame, [*keep, *inputs])
    twice = [name for number, name in enumerate(keep) if name in (*results, *keep[:number])]
    if twice:
        raise ValueError(f"keep={tuple(keep)!r}: the result would have two columns {twice[0]!r}")
    return [f"{quoted(name)} {chosen.schema[name].dataType.simpleString()}" for name in keep]


def _annotations(columns: int) -> dict[str, Any]:
    """Return the type annotations from which Spark infers the kind of a function."""
    import pandas

    series: Any = pandas.Series
    taken = Iterator[series] if columns == 1 else Iterator[tuple[(series,) * columns]]  # type: ignore[misc]
    return {"parts": taken, "return": Iterator[series]}
