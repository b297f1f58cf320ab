"""Archives and datasets behind URLs: an S3 server on loopback."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.bigearthnet_v2 import BigEarthNetV2
from pipelines.dataset import lease, writer
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.writer import prepare_dataset
from pipelines.storage import Folder
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def prepare(spark: SparkSession, root: str | Path, dataset: str | Path, **settings: object) -> Manifest:
    values = {"row_group_mib": 1, "row_groups_per_shard": 2, "seed": 3, **settings}
    return prepare_dataset(spark, BigEarthNetV2(str(root)), dataset, **values)  # type: ignore[arg-type]


def content(dataset: str | Path) -> dict[str, str]:
    """Digest of every file of rows."""
    folder = Folder.at(dataset)
    files = [(split, name) for split in ("train", "validation", "test") for name in folder.names(split)]
    return {f"{split}/{name}": hashlib.sha256(folder.read(f"{split}/{name}")).hexdigest() for split, name in files}


@pytest.fixture(scope="session")
def remote_archive(s3: str, small_archive: Path) -> str:
    return upload(small_archive, f"{s3}/archives/BigEarthNet")


def upload(root: Path, url: str) -> str:
    folder = Folder.at(url)
    folder._filesystem.put(f"{root}/", f"{url}/", recursive=True)
    return url


@pytest.fixture(scope="module")
def remote_dataset(spark: SparkSession, s3: str, small_archive: Path) -> str:
    url = f"{s3}/datasets/small"
    prepare(spark, small_archive, url)
    return url


def test_a_remote_dataset_is_the_local_one(remote_dataset: str, small_dataset: Path) -> None:
    assert content(remote_dataset) == content(small_dataset)
    assert read_manifest(remote_dataset) == read_manifest(small_dataset)
    folder = Folder.at(remote_dataset)
    files = ["_index.parquet", "_notes.json.gz", "_rejected.parquet", "dataset.json", "report.html"]
    assert folder.names() == [*files, "test", "train", "validation"]
    assert b"data:image/png" in folder.read("report.html")


def test_pyarrow_opens_a_shard_on_the_store(remote_dataset: str, small_dataset: Path) -> None:
    import fsspec

    name = read_manifest(remote_dataset).splits["train"].shards[0].file
    table = pq.read_table(f"{remote_dataset.removeprefix('s3://')}/{name}", filesystem=fsspec.filesystem("s3"))
    assert table.equals(pq.read_table(small_dataset / name))


@pytest.mark.parametrize("to", ["local", "s3"])
def test_a_remote_archive_gives_the_same_rows(
    spark: SparkSession, remote_archive: str, small_dataset: Path, tmp_path: Path, s3_folder: str, to: str
) -> None:
    dataset = str(tmp_path / "dataset") if to == "local" else s3_folder
    prepare(spark, remote_archive, dataset)
    assert content(dataset) == content(small_dataset)
    assert read_manifest(dataset) == read_manifest(small_dataset)


def test_bad_records_of_a_remote_archive_move_the_others_up(
    spark: SparkSession, s3_folder: str, small_archive: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(small_archive, tmp_path / "BigEarthNet"))
    victims = sorted(root.rglob("*_B05.tif"))[3:30:4]
    for number, victim in enumerate(victims):
        if number % 2:
            victim.unlink()
        else:
            victim.write_bytes(victim.read_bytes()[: 40 * (number % 3)])
    local = prepare(spark, root, tmp_path / "local", max_rejected_fraction=0.5)
    url = upload(root, f"{s3_folder}/archive")
    remote = prepare(spark, url, tmp_path / "remote", max_rejected_fraction=0.5)
    assert remote == local
    assert sum(remote.skipped.values()) == len(victims)
    assert content(tmp_path / "remote") == content(tmp_path / "local")


def test_finished_changed_and_replaced(
    spark: SparkSession, small_archive: Path, s3_folder: str, small_dataset: Path
) -> None:
    prepare(spark, small_archive, s3_folder)
    folder = Folder.at(s3_folder)
    written = folder.modified("dataset.json")
    lines: list[str] = []
    prepare(spark, small_archive, s3_folder, say=lines.append)
    assert lines == [f"{s3_folder} is finished already; left as it is"]
    assert folder.modified("dataset.json") == written
    with pytest.raises(ValueError, match=r"seed 3 there, 4 asked for.*prepare\.overwrite=true"):
        prepare(spark, small_archive, s3_folder, seed=4)
    assert content(s3_folder) == content(small_dataset)
    folder.write("train/part-99999.parquet", b"of another job")
    with pytest.raises(ValueError, match=r"holds train/part-99999\.parquet, which is not part of the dataset"):
        prepare(spark, small_archive, s3_folder, seed=4, overwrite=True)
    assert content(s3_folder).keys() == content(small_dataset).keys() | {"train/part-99999.parquet"}
    assert read_manifest(folder) == read_manifest(small_dataset)
    folder.remove("train/part-99999.parquet")
    assert prepare(spark, small_archive, s3_folder, seed=4, overwrite=True).settings["seed"] == 4
    assert content(s3_folder) != content(small_dataset)


def test_overwriting_takes_the_manifest_away_first(
    spark: SparkSession, small_archive: Path, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.at(s3_folder)
    prepare(spark, small_archive, s3_folder)
    removed: list[str] = []
    remove = Folder.remove
    monkeypatch.setattr(Folder, "remove", lambda self, name="": (removed.append(name), remove(self, name))[1])
    monkeypatch.setattr(writer, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(spark, small_archive, s3_folder, overwrite=True)
    assert removed[0] == "dataset.json"
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        read_manifest(folder)


def test_something_else_is_refused(spark: SparkSession, small_archive: Path, s3_folder: str) -> None:
    Folder.at(s3_folder).write("mine.txt", b"x")
    with pytest.raises(ValueError, match="exists and is not a dataset"):
        prepare(spark, small_archive, s3_folder)
    assert Folder.at(s3_folder).names() == ["mine.txt"]


@pytest.mark.long
def test_a_killed_driver_loses_nothing(
    spark: SparkSession, small_archive: Path, small_dataset: Path, s3_folder: str
) -> None:
    command = [
        sys.executable, "-m", "jobs.cli", "prepare", "--config", "smoke",
        "--set", f"archive.root={small_archive}", "--set", f"dataset.path={s3_folder}",
        "--set", "prepare.row_group_mib=1", "--set", "prepare.row_groups_per_shard=2", "--set", "prepare.seed=3",
        "--set", "launch.master=local[1]",
    ]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = Folder.at(s3_folder)

    def notes() -> list[str]:
        return [name for name in folder.names("_progress") if "-part-" in name]

    try:
        deadline = time.monotonic() + patient(200)
        while len(notes()) < 2:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not folder.exists("dataset.json")
    with pytest.raises(FileNotFoundError, match="not a finished dataset"):
        read_manifest(s3_folder)
    with pytest.raises(ValueError, match="seed 3 there, 4 asked for"):
        prepare(spark, small_archive, s3_folder, seed=4)
    lines: list[str] = []
    assert prepare(spark, small_archive, s3_folder, say=lines.append) == read_manifest(small_dataset)
    assert any("finished already" in line for line in lines)
    assert content(s3_folder) == content(small_dataset)
    assert "_progress" not in folder.names()


def test_a_second_job_is_refused_while_the_first_lives(
    spark: SparkSession, small_archive: Path, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder.at(s3_folder)
    monkeypatch.setattr(lease, "REFRESH_SECONDS", 0.1)
    with lease.lease(folder, "_progress") as held:
        before = folder.modified(held)
        with pytest.raises(RuntimeError, match=rf"another job is writing.*process {os.getpid()} on"):
            prepare(spark, small_archive, s3_folder)
        deadline = time.monotonic() + patient(20)
        while folder.modified(held) == before:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        lease.check_held(folder, "_progress")
        # Another job takes it for dead; whether or not this one writes its lease once more, it has lost.
        taker = {"host": "far", "pid": 1, "machine": "other", "replaces": [held.rpartition("/")[2]]}
        folder.write("_progress/lease-x.json", json.dumps(taker).encode())
        with pytest.raises(RuntimeError, match="another job took over"):
            lease.check_held(folder, "_progress")


def test_a_lease_of_elsewhere_is_dead_when_it_is_old(s3_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder.at(s3_folder)
    folder.write("_progress/lease-x.json", json.dumps({"host": "far", "pid": 1, "machine": "other"}).encode())
    with pytest.raises(RuntimeError, match="process 1 on far"), lease.lease(folder, "_progress"):
        pass
    modified = Folder.modified
    old = datetime.now(UTC) - timedelta(seconds=lease.DEAD_SECONDS + 5)
    monkeypatch.setattr(
        Folder, "modified", lambda self, name: old if name.endswith("-x.json") else modified(self, name)
    )
    with lease.lease(folder, "_progress") as held:
        assert folder.names("_progress") == [held.rpartition("/")[2]]
        assert json.loads(folder.read(held))["replaces"] == ["lease-x.json"]
    assert folder.names("_progress") == []
