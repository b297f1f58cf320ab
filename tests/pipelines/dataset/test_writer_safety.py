"""Preparation that is stopped, repeated, damaged or run twice at once."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.bigearthnet_v2 import BigEarthNetV2
from pipelines.dataset import writer
from pipelines.dataset.lock import hold
from pipelines.dataset.manifest import Manifest, read_manifest
from pipelines.dataset.reader import SplitReader
from pipelines.dataset.spark_job import PrepareProgress
from pipelines.dataset.writer import prepare_dataset
from pipelines.storage import Folder
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def prepare(spark: SparkSession, root: Path, dataset: Path, **settings: object) -> Manifest:
    values = {"row_group_mib": 1, "row_groups_per_shard": 1, "seed": 3, **settings}
    return prepare_dataset(spark, BigEarthNetV2(str(root)), dataset, **values)  # type: ignore[arg-type]


def content(dataset: Path) -> dict[str, str]:
    """Digest of every file of rows."""
    return {
        str(path.relative_to(dataset)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(dataset.rglob("*.parquet"))
    }


@pytest.fixture(scope="module")
def uninterrupted(spark: SparkSession, small_archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dataset = tmp_path_factory.mktemp("whole") / "dataset"
    prepare(spark, small_archive, dataset)
    return dataset


@pytest.fixture
def damaged_archive(small_archive: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_archive, tmp_path / "BigEarthNet")
    return tmp_path / "BigEarthNet"


def test_a_second_run_redoes_only_what_is_missing(
    spark: SparkSession, small_archive: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = tmp_path / "dataset"

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "finish", stopped)
        with pytest.raises(KeyboardInterrupt):
            prepare(spark, small_archive, dataset)
    staging = tmp_path / "dataset.incomplete"
    assert not dataset.exists()
    shards = sorted(staging.rglob("part-*.parquet"))
    assert len(shards) > 6
    # Lost: the note of one shard, the file of another, the end of a third.
    (staging / "_progress" / f"train-{shards[-1].name}.json").unlink(missing_ok=True)
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:100])
    kept = {path: path.stat().st_mtime_ns for path in shards[2:-1] if path.parent.name == "train"}
    lines: list[str] = []
    prepare(spark, small_archive, dataset, say=lines.append)
    assert any("finished already" in line for line in lines)
    assert content(dataset) == content(uninterrupted)
    touched = [
        path for path, before in kept.items() if (dataset / path.relative_to(staging)).stat().st_mtime_ns != before
    ]
    assert len(touched) <= 1
    assert read_manifest(dataset) == read_manifest(uninterrupted)
    assert not staging.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"dataset"}


@pytest.mark.long
@pytest.mark.parametrize("after_shards", [0, 2])
def test_a_killed_driver_loses_nothing(
    spark: SparkSession, small_archive: Path, uninterrupted: Path, tmp_path: Path, after_shards: int
) -> None:
    dataset = tmp_path / "dataset"
    command = [
        sys.executable, "-m", "jobs.cli", "prepare", "--config", "smoke",
        "--set", f"archive.root={small_archive}", "--set", f"dataset.path={dataset}",
        "--set", "prepare.row_group_mib=1", "--set", "prepare.row_groups_per_shard=1", "--set", "prepare.seed=3",
        "--set", "launch.master=local[1]",
    ]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    progress = tmp_path / "dataset.incomplete" / "_progress"
    try:
        deadline = time.monotonic() + patient(200)
        while len(list(progress.glob("*-part-*.json"))) < after_shards or not progress.exists():
            assert time.monotonic() < deadline
            if process.poll() is not None:
                break
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert prepare(spark, small_archive, dataset) == read_manifest(uninterrupted)
    assert content(dataset) == content(uninterrupted)
    assert not list(dataset.rglob(".*"))


def test_another_archive_or_setting_is_refused_by_name(
    spark: SparkSession, damaged_archive: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(uninterrupted, dataset)
    with pytest.raises(ValueError, match=r"row_group_mib 1 there, 2 asked for.*prepare\.overwrite=true"):
        prepare(spark, damaged_archive, dataset, row_group_mib=2)
    table = pq.read_table(damaged_archive / "metadata.parquet")
    pq.write_table(table.slice(1), damaged_archive / "metadata.parquet")
    with pytest.raises(ValueError, match=r"the archive changed since .* \(0 samples added, 1 removed, 0 changed"):
        prepare(spark, damaged_archive, dataset)
    assert content(dataset) == content(uninterrupted)
    replaced = prepare(spark, damaged_archive, dataset, overwrite=True)
    assert sum(split.rows for split in replaced.splits.values()) == len(table) - 1
    assert {path.name for path in tmp_path.iterdir()} == {"dataset", "BigEarthNet"}


def test_an_unfinished_dataset_of_other_settings_is_refused_by_name(
    spark: SparkSession, small_archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(writer, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(spark, small_archive, tmp_path / "dataset")
    with pytest.raises(ValueError, match=r"dataset\.incomplete was made otherwise \(seed 3 there, 4 asked for\)"):
        prepare(spark, small_archive, tmp_path / "dataset", seed=4)
    assert prepare(spark, small_archive, tmp_path / "dataset", seed=4, overwrite=True).settings["seed"] == 4


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def swap_size(path: Path) -> None:
    shutil.copy(path.with_name(path.name.replace("B05", "B02")), path)


@pytest.mark.parametrize(
    ("damage", "reason"), [(truncate, ""), (Path.unlink, "missing file"), (swap_size, "wrong size")]
)
def test_bad_records_are_left_out_and_listed(
    spark: SparkSession,
    damaged_archive: Path,
    uninterrupted: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    victims = sorted(damaged_archive.rglob("*_B05.tif"))[3:5]
    for victim in victims:
        damage(victim)
    manifest = prepare(spark, damaged_archive, tmp_path / "dataset", max_rejected_fraction=0.1)
    rejected = pq.read_table(tmp_path / "dataset" / "_rejected.parquet").to_pylist()
    assert sorted(row["id"] for row in rejected) == sorted(victim.parent.name for victim in victims)
    assert all(Path(row["file"]).name.endswith("_B05.tif") for row in rejected)
    assert all(reason in row["reason"] for row in rejected)
    assert sum(manifest.skipped.values()) == 2
    rows = sum(split.rows for split in manifest.splits.values())
    assert rows + 2 == sum(split.rows for split in read_manifest(uninterrupted).splits.values())
    ids = [sample for split in manifest.splits for sample in SplitReader(tmp_path / "dataset", split).ids()]
    assert not set(ids) & {victim.parent.name for victim in victims}
    assert len(ids) == rows


def test_too_many_bad_records_fail_and_name_the_list(
    spark: SparkSession, damaged_archive: Path, tmp_path: Path
) -> None:
    for victim in sorted(damaged_archive.rglob("*_B05.tif"))[:3]:
        victim.unlink()
    with pytest.raises(
        ValueError, match=r"3 of 56 samples are bad \(missing file 3\).*max_rejected_fraction=0\.01"
    ) as e:
        prepare(spark, damaged_archive, tmp_path / "dataset")
    assert not (tmp_path / "dataset").exists()
    report = Path(str(e.value).rsplit(": ", 1)[1])
    assert pq.read_metadata(report).num_rows == 3
    lines: list[str] = []
    manifest = prepare(spark, damaged_archive, tmp_path / "dataset", max_rejected_fraction=0.1, say=lines.append)
    assert manifest.skipped == {"missing file": 3}
    assert any("left out 3 of 56 samples: missing file" in line for line in lines)


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    spark: SparkSession, small_archive: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    # The executors' files may not grow beyond some shards' size: what a full disk does to a write.
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False, capture_output=True)
    if not os.path.ismount(disk):
        pytest.skip("a small file system cannot be mounted here")
    try:
        with pytest.raises((RuntimeError, OSError), match="No space left"):
            prepare(spark, small_archive, disk / "dataset")
        assert not (disk / "dataset").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert prepare(spark, small_archive, disk / "dataset") == read_manifest(uninterrupted)
        assert content(disk / "dataset") == content(uninterrupted)
    finally:
        subprocess.run(["umount", disk], check=False)


def test_two_jobs_on_one_dataset_do_not_mix(spark: SparkSession, small_archive: Path, tmp_path: Path) -> None:
    with (
        hold(Folder.at(tmp_path / "dataset")),
        pytest.raises(RuntimeError, match="another job is writing"),
    ):
        prepare(spark, small_archive, tmp_path / "dataset")


def test_progress_ends_at_all_samples(spark: SparkSession, small_archive: Path, tmp_path: Path) -> None:
    seen: list[PrepareProgress] = []
    prepare(spark, small_archive, tmp_path / "dataset", progress=seen.append)
    assert seen[-1] == PrepareProgress(56, 56, 0)


def test_the_list_of_bad_records_is_there_when_it_is_empty(uninterrupted: Path) -> None:
    assert pq.read_table(uninterrupted / "_rejected.parquet").num_rows == 0
    assert json.loads((uninterrupted / "dataset.json").read_text())["skipped"] == {}
