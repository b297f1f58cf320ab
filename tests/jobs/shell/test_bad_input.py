"""Each mistake of a user: one line on standard error, an exit code, no stage started, nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from pyspark.sql import SparkSession

from pipelines.dataset.format.manifest import read_manifest
from pipelines.tracking.store.runs import check_store, start_run

pytestmark = pytest.mark.spark


@pytest.fixture
def error_of(
    spark: SparkSession,
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error_line: Callable[..., str],
) -> Callable[..., str]:
    """Run a job that must fail; the line that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *settings: str, code: int = 2) -> str:
        stages, before = spark.sparkContext.statusTracker().getJobIdsForGroup(None), set(tmp_path.rglob("*"))
        verb, *more = verb.split()
        line = error_line(verb, "--config", "smoke", *more, settings=settings, code=code)
        assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == stages, "a stage was started"
        assert not {path for path in tmp_path.rglob("*") if "mlruns" not in path.parts} - before
        assert line.startswith("groundswell ")
        return line

    return run


@pytest.fixture
def archive_copy(small_archive: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_archive, tmp_path / "BigEarthNet"))


EVALUATE = "evaluate --model runs:/0123456789abcdef0123456789abcdef/model"


@pytest.mark.parametrize(
    ("verb", "settings", "message"),
    [
        *(
            (
                verb,
                "optimizer.momentun=0.8",
                "optimizer.momentun: unknown key of optimizer=lars (did you mean momen",
            )
            for verb in ("prepare", "train")
        ),
        ("train", "training.epochs=many", "training.epochs='many': should be a valid integer"),
        ("train", "optimizer.momentum=1.5", "optimizer.momentum=1.5: should be less than 1"),
        (
            "train",
            "reader.name=petastorm training.checkpoint_every_steps=5",
            "Petastorm's reader cannot resume within an epoch",
        ),
        (
            "train",
            "reader.name=petastorm training.checkpoint_every_steps=null reader.verify=always",
            "reader.verify=always needs reader.name=groundswell",
        ),
        (
            "train",
            "training.output=s3://b/c tracking.offline=true",
            "`groundswell sync` look for them, and training.output=s3://b/c is a URL: set it to a folder",
        ),
        ("train", "reader.cache_folder=s3://b/c", "reader.cache_folder=s3://b/c is a URL"),
        ("prepare", "archive.root=FOLDER/nowhere", "FOLDER/nowhere"),
        ("prepare", "archive.root=FOLDER/empty", "metadata.parquet"),
        ("train", "dataset.path=FOLDER/empty", "no dataset.json"),
        (
            "train",
            "dataset.path=DATASET training.batch_size_per_worker=17",
            "32 training samples, fewer than one global batch of 34 (2 workers x 17)",
        ),
        ("train", "dataset.path=DATASET training.resume_run=nosuchrun", "nosuchrun"),
        (EVALUATE, "dataset.path=DATASET", "0123456789abcdef"),
        (f"{EVALUATE} --split tst", "dataset.path=DATASET", "no split 'tst', only test, train, validation"),
    ],
)
def test_settings_that_cannot_be_used(
    error_of: Callable[..., str], small_dataset: Path, tmp_path: Path, verb: str, settings: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    given, expected = (
        text.replace("DATASET", str(small_dataset)).replace("FOLDER", str(tmp_path)) for text in (settings, message)
    )
    assert expected in error_of(verb, *given.split())


def test_more_workers_than_slots(error_of: Callable[..., str], small_dataset: Path) -> None:
    assert "3 workers do not fit 2 slots" in error_of(
        "train", f"dataset.path={small_dataset}", "launch.num_workers=3", code=4
    )


@pytest.mark.parametrize(
    ("splits", "message"), [([], "metadata.parquet"), (["test"] * 56, "no samples of the split 'train'")]
)
def test_metadata_without_training_samples(
    error_of: Callable[..., str], archive_copy: Path, splits: list[str], message: str
) -> None:
    path = archive_copy / "metadata.parquet"
    table = pq.read_table(path).slice(0, len(splits))
    place = table.schema.get_field_index("split")
    pq.write_table(table.set_column(place, "split", pa.array(splits, pa.string())), path)
    assert message in error_of("prepare", f"archive.root={archive_copy}", "dataset.path=dataset")


def test_metadata_that_names_what_is_not_there(error_of: Callable[..., str], archive_copy: Path) -> None:
    patch = next(archive_copy.glob("BigEarthNet-S2/*/*"))
    shutil.rmtree(patch)
    assert patch.name in error_of("prepare", f"archive.root={archive_copy}")


def test_an_output_in_the_dataset(
    error_of: Callable[..., str], dataset_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.train.spark_session", None)
    line = error_of("train", f"dataset.path={dataset_copy}", f"training.output={dataset_copy}/outputs")
    assert f"training.output={dataset_copy}/outputs is in the dataset {dataset_copy}: choose a folder outside" in line


@pytest.fixture
def dataset_copy(small_dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_dataset, tmp_path / "dataset"))


@pytest.mark.parametrize(("split", "verb"), [("train", "train"), ("validation", "train"), ("test", EVALUATE)])
def test_a_shard_that_is_missing(error_of: Callable[..., str], dataset_copy: Path, split: str, verb: str) -> None:
    (dataset_copy / split / "part-00000.parquet").unlink()
    assert f"{split}/part-00000.parquet is missing: the same `groundswell prepare` command writes" in error_of(
        verb, f"dataset.path={dataset_copy}"
    )


def test_a_cache_of_less_than_three_row_groups(
    error_of: Callable[..., str], dataset_copy: Path, edit_manifest: Callable[..., None]
) -> None:
    path = dataset_copy / "validation" / "part-00000.parquet"
    rows = read_manifest(dataset_copy).splits["validation"].shards[0].row_groups[0]
    pq.write_table(pq.read_table(path), path, compression="zstd", row_group_size=rows)
    size = path.stat().st_size
    edit_manifest(dataset_copy, lambda values: values["splits"]["validation"]["shards"][0].update(size=size))
    assert "reader.cache_limit_gib=0.0001 is less than three row groups" in error_of(
        "train", f"dataset.path={dataset_copy}", "reader.cache_limit_gib=0.0001"
    )


def test_class_names_that_were_swapped_by_hand(error_of: Callable[..., str], dataset_copy: Path) -> None:
    values = json.loads((dataset_copy / "dataset.json").read_text())
    values["class_names"].reverse()
    (dataset_copy / "dataset.json").write_text(json.dumps(values))
    assert "dataset.json was changed after it was written" in error_of("train", f"dataset.path={dataset_copy}")


@pytest.mark.parametrize("verb", ["train", "find-rate"])
def test_a_store_that_does_not_answer_is_told_before_spark_starts(
    error_of: Callable[..., str], small_dataset: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(f"jobs.{verb.replace('-', '_')}.spark_session", None)
    assert "no answer from MLflow, see MLFLOW_TRACKING_URI: API request to" in error_of(
        verb, f"dataset.path={small_dataset}", code=4
    )


@pytest.mark.parametrize("verb", ["train", "find-rate"])
def test_a_deleted_experiment_is_told_before_spark_starts(
    error_of: Callable[..., str], small_dataset: Path, mlflow_store: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    start_run("gone", None, {}, {})
    client = MlflowClient(mlflow_store)
    experiment = client.get_experiment_by_name("gone").experiment_id
    client.delete_experiment(experiment)
    monkeypatch.setattr(f"jobs.{verb.replace('-', '_')}.spark_session", None)
    line = error_of(verb, f"dataset.path={small_dataset}", "tracking.experiment=gone")
    expected = f"choose another name, or restore it with `mlflow experiments restore --experiment-id {experiment}`"
    assert f"tracking.experiment=gone is deleted in {mlflow_store}: {expected}" in line
    with pytest.raises(ValueError, match=r"tracking\.experiment=gone is deleted"):
        start_run("gone", None, {}, {})
    client.restore_experiment(experiment)
    assert check_store("gone") == f"{mlflow_store} answers"
