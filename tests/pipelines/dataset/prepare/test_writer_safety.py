"""Preparation by Spark that is stopped, finds bad records and full disks, loses processes, or is run twice at once."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.archive import ArchiveDescription
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.prepare.plan import plan_shards
from pipelines.dataset.prepare.shard import ShardPlan, write_shard
from pipelines.dataset.prepare.spark_job import PrepareProgress
from pipelines.dataset.read.reader import SplitReader
from tests.patience import patient
from tests.pipelines.dataset.files import DATA, content, kill_preparation, prepare

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


@pytest.mark.long
@pytest.mark.parametrize("after_shards", [0, 2])
def test_a_killed_driver_loses_nothing(
    spark: SparkSession, small_archive: Path, small_dataset: Path, tmp_path: Path, after_shards: int
) -> None:
    dataset, progress = tmp_path / "dataset", tmp_path / "dataset.incomplete" / "_progress"
    kill_preparation(
        small_archive,
        dataset,
        lambda: progress.exists() and len(list(progress.glob("*-part-*.json"))) >= after_shards,
    )
    assert (prepare(spark, small_archive, dataset), content(dataset, DATA)) == (
        read_manifest(small_dataset),
        content(small_dataset, DATA),
    )
    assert not list(dataset.rglob(".*"))


def test_bad_records_are_named_left_out_and_listed(spark: SparkSession, tmp_path: Path) -> None:
    root, dataset = tmp_path / "BigEarthNet", tmp_path / "dataset"
    generate_bigearthnet_v2(root, train=12, validation=4, test=4, processes=1)
    truncated, missing, other = sorted(root.rglob("*_B05.tif"))[3:6]
    truncated.write_bytes(truncated.read_bytes()[:1000])
    missing.unlink()
    shutil.copy(other.with_name(other.name.replace("B05", "B02")), other)
    told = r"3 of 20 samples are bad \(.*missing file 1.*\).*max_rejected_fraction=0\.01"
    with pytest.raises(ValueError, match=told) as raised:
        prepare(spark, root, dataset)
    assert (dataset.exists(), pq.read_metadata(str(raised.value).rsplit(": ", 1)[1]).num_rows) == (False, 3)
    lines: list[str] = []
    manifest = prepare(spark, root, dataset, max_rejected_fraction=0.2, say=lines.append)
    expected = {truncated: "not a readable GeoTIFF", missing: "missing file", other: "wrong size"}
    assert manifest.skipped == dict.fromkeys(expected.values(), 1)
    assert any("left out 1 of 20 samples: missing file" in line for line in lines)
    rejected = {row["id"]: row for row in pq.read_table(dataset / "_rejected.parquet").to_pylist()}
    assert {name: (row["file"], row["reason"]) for name, row in rejected.items()} == {
        path.parent.name: (str(path), reason) for path, reason in expected.items()
    }
    ids = [sample for split in manifest.splits for sample in SplitReader(dataset, split).ids()]
    assert len(ids) == sum(split.rows for split in manifest.splits.values()) == 17
    assert not set(ids) & set(rejected)


@pytest.mark.long
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    spark: SparkSession, small_archive: Path, small_dataset: Path, tmp_path: Path
) -> None:
    # The executors' files may not grow beyond some shards' size: what a full disk does to a write.
    disk, seen = tmp_path / "disk", list[PrepareProgress]()
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False, capture_output=True)
    if not os.path.ismount(disk):
        pytest.skip("a small file system cannot be mounted here")
    try:
        with pytest.raises((RuntimeError, OSError), match="No space left"):
            prepare(spark, small_archive, disk / "dataset")
        assert not (disk / "dataset").exists()
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert (
            prepare(spark, small_archive, disk / "dataset", progress=seen.append),
            content(disk / "dataset", DATA),
            seen[-1].done,
            seen[-1].total,
            seen[-1].rejected,
        ) == (read_manifest(small_dataset), content(small_dataset, DATA), 56, 56, 0)
    finally:
        subprocess.run(["umount", disk], check=False)


# Prepares in a session of its own. The first attempt of one sample's read ends its process.
JOB = """
import os, signal, sys
from dataclasses import dataclass
from pathlib import Path
from pyspark.sql import SparkSession
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.dataset.prepare.writer import prepare_dataset

@dataclass(frozen=True)
class Troubled:
    inner: BigEarthNetV2
    mark: str
    how: str
    victim: str

    @property
    def root(self): return self.inner.root
    @property
    def description(self): return self.inner.description
    def index(self): return self.inner.index()
    @property
    def read_settings(self): return self.inner.read_settings

    def read(self, paths, out):
        place = self.inner.read(paths, out)
        if not paths[0].endswith(self.victim):
            return place
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return place
        if self.how == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "executor":
            pid = os.getppid()
            while b"java" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")[0]:
                pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(pid, signal.SIGKILL)

root, dataset, mark, how, master = sys.argv[1:]
builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
with builder.getOrCreate() as spark:
    inner = BigEarthNetV2(root)
    archive = Troubled(inner, mark, how, inner.index().samples["paths"][0].as_py()[0])
    prepare_dataset(spark, archive, Path(dataset), row_group_mib=1, row_groups_per_shard=2, seed=3, say=print)
"""


# Spark itself does not try again in local mode. There the executor is the driver, so it is killed in a cluster.
@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "master"),
    [("worker", "local[2]"), ("executor", "local-cluster[2,1,1024]")],
)
def test_a_killed_process_is_tried_again(
    how: str, master: str, project: Path, small_archive: Path, small_dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    mark = tmp_path / "mark"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, tmp_path / "job.py", small_archive, tmp_path / "dataset", mark, how, master]
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patient(200)
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert mark.exists()
    if how == "worker":
        told = r"a Python worker on \S+ \(executor driver\) died at the shard \w+/part-\d+\.parquet, probably killed"
        assert re.search(told, result.stdout), result.stdout
    assert content(tmp_path / "dataset", DATA) == content(small_dataset, DATA)
    assert not list((tmp_path / "dataset").rglob(".*"))


class Together:
    """An archive whose first read waits until the other attempt reads too."""

    def __init__(self, inner: BigEarthNetV2, barrier: object) -> None:
        self.inner, self.barrier, self.root = inner, barrier, inner.root
        self.waited = False

    @property
    def description(self) -> ArchiveDescription:
        return self.inner.description

    def read(self, paths: object, out: object) -> object:
        if not self.waited:
            self.waited = True
            self.barrier.wait(patient(60))  # type: ignore[attr-defined]
        return self.inner.read(paths, out)  # type: ignore[arg-type]


def attempt(plan: ShardPlan, archive: BigEarthNetV2, barrier: object, folder: Path) -> None:
    write_shard(plan, Together(archive, barrier), folder)  # type: ignore[arg-type]


@pytest.mark.long
def test_two_attempts_at_the_same_time_leave_one_file(small_archive: Path, small_dataset: Path, tmp_path: Path) -> None:
    archive = BigEarthNetV2(str(small_archive))
    plan = plan_shards(archive, archive.index(), row_group_mib=1, row_groups_per_shard=2, seed=3)["train"][0]
    for folder in ("train", "_progress"):
        (tmp_path / folder).mkdir()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [context.Process(target=attempt, args=(plan, archive, barrier, tmp_path)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(patient(120))
    assert ([process.exitcode for process in processes], (tmp_path / plan.file).read_bytes()) == (
        [0, 0],
        (small_dataset / plan.file).read_bytes(),
    )
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "_progress/train-part-00000.parquet.json",
        "train/part-00000.parquet",
    ]
