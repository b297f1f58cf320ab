"""Archives and datasets behind URLs: an S3 server on loopback."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.dataset.format.manifest import read_manifest
from pipelines.storage import lease
from pipelines.storage.folder import Location
from tests.pipelines.dataset.files import DATA, content, kill_preparation, prepare, upload

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def remote_dataset(spark: SparkSession, s3: str, small_archive: Path) -> str:
    url = f"{s3}/datasets/small"
    prepare(spark, small_archive, url)
    return url


def test_a_remote_dataset_is_the_local_one(remote_dataset: str, small_dataset: Path) -> None:
    assert (content(remote_dataset, DATA), read_manifest(remote_dataset)) == (
        content(small_dataset, DATA),
        read_manifest(small_dataset),
    )
    folder = Location.at(remote_dataset)
    files = ["_index.parquet", "_notes.json.gz", "_rejected.parquet", "dataset.json", "report.html"]
    assert folder.names() == [*files, "test", "train", "validation"]
    assert b"data:image/png" in folder.read("report.html")


def test_a_finished_dataset_on_the_store_is_left_alone_and_another_is_refused(
    spark: SparkSession, remote_dataset: str, small_archive: Path, small_dataset: Path
) -> None:
    written, lines = Location.at(remote_dataset).modified("dataset.json"), list[str]()
    prepare(spark, small_archive, remote_dataset, say=lines.append)
    assert lines == [f"{remote_dataset} is finished already; left as it is"]
    with pytest.raises(ValueError, match=r"seed 3 there, 4 asked for.*prepare\.overwrite=true"):
        prepare(spark, small_archive, remote_dataset, seed=4)
    assert (Location.at(remote_dataset).modified("dataset.json"), content(remote_dataset, DATA)) == (
        written,
        content(small_dataset, DATA),
    )


@pytest.mark.long
def test_a_remote_archive_gives_the_same_rows_and_its_bad_records_move_the_others_up(
    spark: SparkSession, s3_folder: str, tmp_path: Path
) -> None:
    root = tmp_path / "BigEarthNet"
    generate_bigearthnet_v2(root, train=12, validation=4, test=4, processes=1)
    removed, shortened, emptied = sorted(root.rglob("*_B05.tif"))[3:12:4]
    removed.unlink()
    shortened.write_bytes(shortened.read_bytes()[:40])
    emptied.write_bytes(b"")
    local = prepare(spark, root, tmp_path / "local", max_rejected_fraction=0.5)
    remote = prepare(spark, upload(root, f"{s3_folder}/archive"), f"{s3_folder}/remote", max_rejected_fraction=0.5)
    assert (remote, sum(remote.skipped.values())) == (local, 3)
    found, expected = content(f"{s3_folder}/remote", ".parquet"), content(tmp_path / "local", ".parquet")
    del found["_rejected.parquet"], expected["_rejected.parquet"]  # they name the files
    assert found == expected


@pytest.mark.long
def test_a_killed_driver_loses_nothing(
    spark: SparkSession, small_archive: Path, small_dataset: Path, s3_folder: str
) -> None:
    folder = Location.at(s3_folder)
    kill_preparation(
        small_archive,
        s3_folder,
        lambda: sum("-part-" in name for name in folder.names("_progress")) >= 2,
    )
    assert not folder.exists("dataset.json")
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        read_manifest(s3_folder)
    with pytest.raises(ValueError, match="seed 3 there, 4 asked for"):
        prepare(spark, small_archive, s3_folder, seed=4)
    lines: list[str] = []
    assert prepare(spark, small_archive, s3_folder, say=lines.append) == read_manifest(small_dataset)
    assert any("finished already" in line for line in lines)
    assert content(s3_folder, DATA) == content(small_dataset, DATA)


def test_a_second_job_is_refused_while_the_first_lives(
    spark: SparkSession, small_archive: Path, s3_folder: str
) -> None:
    folder = Location.at(s3_folder)
    with lease.lease(folder, "_progress"):
        with pytest.raises(RuntimeError, match=rf"another job is writing.*process {os.getpid()} on"):
            prepare(spark, small_archive, s3_folder)
        lease.check_owner(folder, "_progress")


def test_a_lease_of_elsewhere_is_dead_when_it_is_old(s3_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Location.at(s3_folder)
    folder.write("_progress/lease-x.json", json.dumps({"host": "far", "pid": 1, "machine": "other"}).encode())
    with pytest.raises(RuntimeError, match="process 1 on far"), lease.lease(folder, "_progress"):
        pass
    modified = Location.modified
    old = datetime.now(UTC) - timedelta(seconds=lease.DEAD_SECONDS + 5)
    monkeypatch.setattr(
        Location, "modified", lambda self, name: old if name.endswith("-x.json") else modified(self, name)
    )
    with lease.lease(folder, "_progress") as held:
        assert (folder.names("_progress"), json.loads(folder.read(held))["replaces"]) == (
            [held.rpartition("/")[2]],
            ["lease-x.json"],
        )
    assert folder.names("_progress") == []
