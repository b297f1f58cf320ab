"""Several worker processes read one dataset."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.dataset.read.reader import ReaderSettings, SplitReader, training_batches
from pipelines.launch.runner import BarrierRunner, WorkerError

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]


def read_epoch(dataset: str, cache: str) -> list[list[int]]:
    """Rows of each batch of this rank, its pixels compared with those of the row's number in the whole split."""
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    reader = SplitReader(dataset, "train", ReaderSettings(cache_folder=Path(cache)))
    batches = training_batches(reader, seed=0, epoch=0, global_batch_size=8, rank=rank, size=size)
    return [batch.rows.tolist() for batch in batches]


@pytest.fixture
def copied(small_dataset: Path, tmp_path: Path) -> Path:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    shutil.copytree(small_dataset, tmp_path / "copy")
    return tmp_path / "copy"


def run(spark: SparkSession, function: Any, *args: Any) -> list[Any]:
    return BarrierRunner(spark, 2, on_log=lambda rank, line: None).run_all(function, *args)


def test_ranks_share_a_cache_and_one_order(
    spark: SparkSession, copied: Path, tmp_path: Path, edit_manifest: Callable[..., None]
) -> None:
    row_groups = []

    def compress(manifest: dict[str, Any]) -> None:
        for shard in manifest["splits"]["train"]["shards"]:
            table = pq.read_table(copied / shard["file"])
            pq.write_table(table, copied / shard["file"], compression="zstd", row_group_size=shard["row_groups"][0])
            shard["size"] = (copied / shard["file"]).stat().st_size
            row_groups.extend(shard["row_groups"])

    edit_manifest(copied, compress)
    first, second = run(spark, read_epoch, str(copied), str(tmp_path / "cache"))
    alone = training_batches(SplitReader(copied, "train"), seed=0, epoch=0, global_batch_size=8)
    assert ([a + b for a, b in zip(first, second, strict=True)], len(list((tmp_path / "cache").glob("*.parquet")))) == (
        [batch.rows.tolist() for batch in alone],
        len(row_groups),
    )


def test_a_damaged_file_stops_every_rank_at_once(spark: SparkSession, copied: Path, tmp_path: Path) -> None:
    os.truncate(copied / "train" / "part-00000.parquet", 100_000)
    with pytest.raises(WorkerError, match=r"rank [01].*ValueError: shard .*part-00000.parquet has 100000 bytes"):
        run(spark, read_epoch, str(copied), str(tmp_path / "cache"))


def read_until_it_breaks(dataset: str, shard: str) -> None:
    """Rank 1 meets a file that shrinks while it is read; rank 0 waits for it, as in an allreduce."""
    reader, rank_0_has_opened = SplitReader(dataset, "train"), Path(dataset, "rank-0-has-opened")
    if os.environ["HOROVOD_RANK"] == "0":
        rank_0_has_opened.touch()
        time.sleep(300)
    while not rank_0_has_opened.exists():  # it would find the file cut short when it opens it
        time.sleep(0.05)
    os.truncate(shard, 4096)
    for epoch in range(3):
        list(training_batches(reader, seed=0, epoch=epoch, global_batch_size=8))


def test_a_rank_that_fails_to_read_takes_the_job_down(spark: SparkSession, copied: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1.*part-00000.parquet, row group \d, row \d+ .* was truncated"):
        run(spark, read_until_it_breaks, str(copied), str(copied / "train" / "part-00000.parquet"))
