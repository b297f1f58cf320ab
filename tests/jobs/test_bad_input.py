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

from jobs import cli
from pipelines.dataset.manifest import Manifest, read_manifest, write_manifest
from pipelines.tracking.runs import check_store, start_run

pytestmark = pytest.mark.spark


@pytest.fixture
def error_of(
    spark: SparkSession,
    mlflow_store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., str]:
    """Run a job that must fail; the line that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *settings: str, extra: tuple[str, ...] = (), code: int = 2) -> str:
        stages = spark.sparkContext.statusTracker().getJobIdsForGroup(None)
        before = set(tmp_path.rglob("*"))
        arguments = [verb, "--config", "smoke", *(part for setting in settings for part in ("--set", setting)), *extra]
        assert cli.execute(arguments) == code
        assert spark.sparkContext.statusTracker().getJobIdsForGroup(None) == stages, "a stage was started"
        left = {path for path in tmp_path.rglob("*") if "mlruns" not in path.parts} - before
        assert not left
        captured = capsys.readouterr()
        (line,) = captured.err.strip().splitlines()
        assert line.startswith("groundswell ")
        return line

    return run


@pytest.fixture
def archive_copy(small_archive: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_archive, tmp_path / "BigEarthNet")
    return tmp_path / "BigEarthNet"


@pytest.mark.parametrize("verb", ["prepare", "train"])
def test_configuration(error_of: Callable[..., str], verb: str) -> None:
    unknown = "optimizer.momentun: unknown key of optimizer=lars (did you mean momentum?)"
    assert unknown in error_of(verb, "optimizer.momentun=0.8")
    assert "training.epochs='many': should be a valid integer" in error_of(verb, "training.epochs=many")
    assert "optimizer.momentum=1.5: should be less than 1" in error_of(verb, "optimizer.momentum=1.5")


def test_settings_that_cannot_hold_together(error_of: Callable[..., str]) -> None:
    refused = error_of("train", "reader.name=petastorm", "training.checkpoint_every_steps=5")
    assert "Petastorm's reader cannot resume within an epoch" in refused
    offline = error_of("train", "training.output=s3://b/c", "tracking.offline=true")
    assert "`groundswell sync` look for them, and training.output=s3://b/c is a URL: set it to a folder" in offline
    assert "reader.cache_folder=s3://b/c is a URL" in error_of("train", "reader.cache_folder=s3://b/c")


def test_a_missing_archive(error_of: Callable[..., str], tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in error_of("prepare", f"archive.root={tmp_path / 'nowhere'}")


def test_an_empty_archive(error_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "metadata.parquet" in error_of("prepare", f"archive.root={tmp_path / 'empty'}")


def test_metadata_without_rows(error_of: Callable[..., str], archive_copy: Path) -> None:
    path = archive_copy / "metadata.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert "metadata.parquet" in error_of("prepare", f"archive.root={archive_copy}")


def test_metadata_that_names_what_is_not_there(error_of: Callable[..., str], archive_copy: Path) -> None:
    patch = next(archive_copy.glob("BigEarthNet-S2/*/*"))
    shutil.rmtree(patch)
    assert patch.name in error_of("prepare", f"archive.root={archive_copy}")


def test_a_training_split_is_needed(error_of: Callable[..., str], archive_copy: Path) -> None:
    path = archive_copy / "metadata.parquet"
    table = pq.read_table(path)
    column = pa.array(["test"] * len(table))
    pq.write_table(table.set_column(table.schema.get_field_index("split"), "split", column), path)
    line = error_of("prepare", f"archive.root={archive_copy}", "dataset.path=dataset")
    assert "no samples of the split 'train'" in line


def test_a_folder_without_manifest(error_of: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "no dataset.json" in error_of("train", f"dataset.path={tmp_path / 'data'}")


def test_an_output_in_the_dataset(
    error_of: Callable[..., str], dataset_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.train.spark_session", None)
    line = error_of("train", f"dataset.path={dataset_copy}", f"training.output={dataset_copy}/outputs")
    assert f"training.output={dataset_copy}/outputs is in the dataset {dataset_copy}: choose a folder outside" in line


def test_more_workers_than_slots(error_of: Callable[..., str], small_dataset: Path) -> None:
    line = error_of("train", f"dataset.path={small_dataset}", "launch.num_workers=3", code=4)
    assert "3 workers do not fit 2 slots" in line


def test_fewer_rows_than_one_global_batch(error_of: Callable[..., str], small_dataset: Path) -> None:
    line = error_of("train", f"dataset.path={small_dataset}", "training.batch_size_per_worker=17")
    assert "32 training samples, fewer than one global batch of 34 (2 workers x 17)" in line


def test_a_run_that_is_not_there_cannot_be_resumed(error_of: Callable[..., str], small_dataset: Path) -> None:
    assert "nosuchrun" in error_of("train", f"dataset.path={small_dataset}", "training.resume_run=nosuchrun")


def test_a_model_or_split_that_is_not_there(error_of: Callable[..., str], small_dataset: Path) -> None:
    dataset = f"dataset.path={small_dataset}"
    model = ("--model", "runs:/0123456789abcdef0123456789abcdef/model")
    assert "0123456789abcdef" in error_of("evaluate", dataset, extra=model)
    line = error_of("evaluate", dataset, extra=(*model, "--split", "tst"))
    assert "no split 'tst', only test, train, validation" in line


@pytest.fixture
def dataset_copy(small_dataset: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_dataset, tmp_path / "dataset")
    return tmp_path / "dataset"


@pytest.mark.parametrize(("split", "verb"), [("train", "train"), ("validation", "train"), ("test", "evaluate")])
def test_a_shard_that_is_missing(error_of: Callable[..., str], dataset_copy: Path, split: str, verb: str) -> None:
    (dataset_copy / split / "part-00000.parquet").unlink()
    extra = ("--model", "runs:/none/model") if verb == "evaluate" else ()
    line = error_of(verb, f"dataset.path={dataset_copy}", extra=extra)
    assert f"{split}/part-00000.parquet is missing: the same `groundswell prepare` command writes" in line


def test_a_cache_of_less_than_three_row_groups(error_of: Callable[..., str], dataset_copy: Path) -> None:
    path = dataset_copy / "validation" / "part-00000.parquet"
    manifest = read_manifest(dataset_copy)
    rows = manifest.splits["validation"].shards[0].row_groups[0]
    pq.write_table(pq.read_table(path), path, compression="zstd", row_group_size=rows)
    splits = manifest.model_dump(mode="json")["splits"]
    splits["validation"]["shards"][0]["size"] = path.stat().st_size
    write_manifest(
        Manifest.model_validate_json(json.dumps(manifest.model_dump(mode="json") | {"splits": splits})), dataset_copy
    )
    line = error_of("train", f"dataset.path={dataset_copy}", "reader.cache_limit_gib=0.0001")
    assert "reader.cache_limit_gib=0.0001 is less than three row groups" in line


def test_class_names_that_were_swapped_by_hand(error_of: Callable[..., str], dataset_copy: Path) -> None:
    values = json.loads((dataset_copy / "dataset.json").read_text())
    values["class_names"].reverse()
    (dataset_copy / "dataset.json").write_text(json.dumps(values))
    assert "dataset.json was changed after it was written" in error_of("train", f"dataset.path={dataset_copy}")


def test_checksums_that_petastorms_reader_does_not_know(error_of: Callable[..., str]) -> None:
    line = error_of("train", "reader.name=petastorm", "training.checkpoint_every_steps=null", "reader.verify=always")
    assert "reader.verify=always needs reader.name=groundswell" in line


@pytest.mark.parametrize("verb", ["train", "find-rate"])
def test_a_store_that_does_not_answer_is_told_before_spark_starts(
    error_of: Callable[..., str], small_dataset: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(f"jobs.{verb.replace('-', '_')}.spark_session", None)
    line = error_of(verb, f"dataset.path={small_dataset}", code=4)
    assert "no answer from MLflow, see MLFLOW_TRACKING_URI: API request to" in line


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
