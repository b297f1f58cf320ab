"""A model over Spark DataFrames: as a function, in SQL, streaming, and by MLflow's own function."""

import io
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PythonException
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, FloatType

import pipelines.scoring
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.format.rows import arrow_schema
from pipelines.dataset.read.reader import SplitReader
from pipelines.scoring import flat_columns, predict_udf, score_frame
from pipelines.scoring.predict import frames
from pipelines.scoring.predict.frames import fixed_batches
from pipelines.tracking.store.store import tracking_uri
from tests.patience import patient

INPUTS = ("bands_10m", "bands_20m", "bands_60m")


def test_batches_have_one_size_whatever_spark_sends(small_dataset: Path) -> None:
    import pyarrow.parquet as pq

    manifest = read_manifest(small_dataset)
    fields = {group.name: (group.shape, np.dtype(group.dtype)) for group in manifest.groups}
    file = small_dataset / manifest.splits["train"].shards[0].file
    rows, table = sum(manifest.splits["train"].shards[0].row_groups), pq.read_table(file, columns=["id", *fields])
    assert table.schema.field("bands_10m").type == arrow_schema(manifest.groups, 19).field("bands_10m").type
    slices = (table.slice(start, size) for start, size in ((0, 3), (3, 1), (4, 6), (10, rows)))
    batches = [batch for part in slices for batch in part.combine_chunks().to_batches()]
    images, found = SplitReader(small_dataset, "train").gather(np.arange(rows)).images, list[str]()
    for known, pixels in fixed_batches(iter(batches), fields, ["id"], 4):
        assert {name: each.shape for name, each in pixels.items()} == {name: (4, *fields[name][0]) for name in fields}
        for name in fields:
            np.testing.assert_array_equal(
                pixels[name][: len(known)], images[name][len(found) : len(found) + len(known)]
            )
        found += known["id"].to_pylist()
    assert found == table["id"].to_pylist()


@pytest.mark.parametrize("dtype", ["float32", "uint16", "uint8"])
def test_flat_numbers_are_those_of_the_pixels(dtype: str) -> None:
    pixels = np.array([-12.75, 0.5, 3.0, 250.0] if dtype == "float32" else [0, 1, 3, 250], dtype).reshape(2, 1, 2, 1)
    files = [io.BytesIO(), io.BytesIO()]
    for file, image in zip(files, pixels, strict=True):
        np.save(file, image)
    batch = pa.RecordBatch.from_pydict(
        {"id": ["a", "b"], "image": pa.array([file.getvalue() for file in files], pa.binary())}
    )
    table = frames.flattened(batch, {"image": ((1, 2, 1), np.dtype(dtype))}, ["id"])
    assert (table.to_pydict(), table.schema.field("image").type.value_type) == (
        {"id": ["a", "b"], "image": pixels.reshape(2, 2).tolist()},
        pa.float32() if dtype == "float32" else pa.int32(),
    )


@pytest.fixture
def frame(spark: SparkSession, small_dataset: Path) -> DataFrame:
    return spark.read.parquet(str(small_dataset / "test"))


def check(rows: list[Any], expected: Any, count: int = 12) -> None:
    assert len({row["id"] for row in rows}) == count
    np.testing.assert_allclose([row["probabilities"] for row in rows], [expected[row["id"]] for row in rows], atol=1e-5)


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_use_store")
def test_frames_sql_streams_and_mlflow_predict_the_same(
    spark: SparkSession, frame: DataFrame, small_dataset: Path, logged: Any, expected: Any, tmp_path: Path
) -> None:
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "5")
    rows = score_frame(frame, logged.uri, keep=["id", "tile"], batch_size=4).collect()
    check(rows, expected)
    assert all(row["tile"] for row in rows)
    assert any(row["labels"] for row in rows)

    frame.createOrReplaceTempView("patches")
    spark.udf.register("predict", predict_udf(spark, logged.uri, batch_size=4))
    check(spark.sql(f"select id, predict({', '.join(INPUTS)}) as probabilities from patches").collect(), expected)

    stream = spark.readStream.schema(frame.schema).parquet(str(small_dataset / "test"))
    query = (
        score_frame(stream, logged.uri, batch_size=4)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "stream"))
    )
    assert query.awaitTermination(patient(120))
    check(spark.read.parquet(str(tmp_path / "stream")).collect(), expected)

    selected = stream.selectExpr("id", f"predict({', '.join(INPUTS)}) as probabilities")
    query = selected.writeStream.format("memory").queryName("predicted").trigger(availableNow=True).start()
    assert query.awaitTermination(patient(120))
    check(spark.table("predicted").collect(), expected)

    flat = flat_columns(frame, logged.uri)
    mlflow.set_tracking_uri(tracking_uri())
    try:
        of_mlflow = mlflow.pyfunc.spark_udf(spark, logged.uri, result_type="array<float>", env_manager="local")
        check(flat.select("id", of_mlflow(*INPUTS).alias("probabilities")).collect(), expected)
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]

    file, shapes = str(logged.file), [[120, 120, 4], [60, 60, 6], [20, 20, 2]]

    def load() -> Any:
        import keras

        model = keras.saving.load_model(file, compile=False)

        def predict(first: Any, second: Any, third: Any) -> Any:  # Spark counts the arguments
            return model.predict_on_batch(
                {name: image.astype("uint16") for name, image in zip(INPUTS, (first, second, third), strict=True)}
            )

        return predict

    of_spark = predict_batch_udf(load, return_type=ArrayType(FloatType()), batch_size=4, input_tensor_shapes=shapes)
    check(flat.select("id", of_spark(*INPUTS).alias("probabilities")).collect(), expected)


def test_the_functions_are_names_of_the_package() -> None:
    assert pipelines.scoring.predict_udf is frames.predict_udf
    with pytest.raises(AttributeError, match="no attribute 'predict_all'"):
        _ = pipelines.scoring.predict_all


@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
def test_a_missing_column_is_named(frame: DataFrame, logged: Any) -> None:
    for function, given, keep, message in (
        (
            score_frame,
            frame.drop("bands_20m"),
            ("id",),
            "the DataFrame has no column 'bands_20m'; its columns are id, ",
        ),
        (score_frame, frame, (), "name a column, such as id"),
        (flat_columns, frame, (), "name a column, such as id"),
        (score_frame, frame, ("id", "labels"), "the result would have two columns 'labels'"),
        (flat_columns, frame, ("id", "bands_10m"), "the result would have two columns 'bands_10m'"),
    ):
        with pytest.raises(ValueError, match=message):
            function(given, logged.uri, keep=keep)
    assert score_frame(frame, logged.uri, keep=("id", "bands_10m")).columns[:2] == ["id", "bands_10m"]


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.usefixtures("_use_store")
def test_executors_of_another_code_are_refused(frame: DataFrame, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "OWN_VERSION", "0.0.1 (code 000000000000)")
    predict = predict_udf(frame.sparkSession, logged.uri)
    for result in (score_frame(frame, logged.uri), flat_columns(frame, logged.uri), frame.select(predict(*INPUTS))):
        with pytest.raises(PythonException, match=r"the driver runs groundswell 0\.0\.1 \(code 000000000000\)"):
            result.collect()
