import json
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.archives.archive import read_sample
from pipelines.archives.bigearthnet_v2 import BigEarthNetV2
from pipelines.dataset.reader import SplitReader, epoch_order, evaluation_batches, steps_per_epoch, training_batches

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def reader(small_dataset: Path) -> SplitReader:
    return SplitReader(small_dataset, "train")


def key(batch_images: dict[str, np.ndarray]) -> list[bytes]:
    """One digest-like value per sample: its coarsest bands."""
    return [image.tobytes() for image in batch_images["bands_60m"]]


def test_rows_are_the_archives_pixels(reader: SplitReader, small_archive: Path) -> None:
    archive = BigEarthNetV2(str(small_archive))
    rows = np.array([5, 0, 31, 5])
    batch = reader.gather(rows)
    ids = reader.ids()
    for place, row in enumerate(rows):
        images = read_sample(archive, [f"BigEarthNet-S2/{ids[row].rsplit('_', 2)[0]}/{ids[row]}"])
        for name, image in images.items():
            assert batch.images[name].dtype == np.uint16
            np.testing.assert_array_equal(batch.images[name][place], image)
    assert batch.targets.shape == (4, 19)


def test_the_order_is_a_pure_function_of_seed_and_epoch() -> None:
    np.testing.assert_array_equal(epoch_order(100, 0, 1), epoch_order(100, 0, 1))
    assert sorted(epoch_order(100, 0, 1)) == list(range(100))
    assert (epoch_order(100, 0, 0) != epoch_order(100, 0, 1)).any()
    assert (epoch_order(100, 0, 0) != epoch_order(100, 1, 0)).any()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(reader: SplitReader, size: int) -> None:
    alone = [key(batch.images) for batch in training_batches(reader, seed=1, epoch=2, global_batch_size=12)]
    parts = [
        list(training_batches(reader, seed=1, epoch=2, global_batch_size=12, rank=rank, size=size))
        for rank in range(size)
    ]
    assert {len(part) for part in parts} == {steps_per_epoch(32, 12)} == {2}
    for step, whole in enumerate(alone):
        assert [sample for part in parts for sample in key(part[step].images)] == whole


def test_resuming_gives_what_would_have_come(reader: SplitReader) -> None:
    whole = [key(batch.images) for batch in training_batches(reader, seed=0, epoch=0, global_batch_size=8)]
    rest = training_batches(reader, seed=0, epoch=0, global_batch_size=8, start_step=2)
    assert [key(batch.images) for batch in rest] == whole[2:]


def test_ranks_that_do_not_divide_the_batch_are_refused(reader: SplitReader) -> None:
    with pytest.raises(ValueError, match="12 does not divide among 5"):
        next(iter(training_batches(reader, seed=0, epoch=0, global_batch_size=12, size=5)))


@pytest.mark.parametrize(("size", "batch_size"), [(1, 32), (1, 5), (2, 7), (3, 4), (5, 64)])
def test_evaluation_sees_every_sample_once(reader: SplitReader, size: int, batch_size: int) -> None:
    seen = []
    for rank in range(size):
        for batch in evaluation_batches(reader, batch_size=batch_size, rank=rank, size=size):
            assert len(batch.targets) == batch_size
            seen += [sample for sample, weight in zip(key(batch.images), batch.weights, strict=True) if weight]
    assert seen == key(reader.gather(np.arange(32)).images)


def test_the_thread_ends_with_its_consumer(reader: SplitReader) -> None:
    batches = training_batches(reader, seed=0, epoch=0, global_batch_size=2)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 5
    while any(thread.name == "groundswell-reader" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_missing_split_lists_the_others(small_dataset: Path) -> None:
    with pytest.raises(ValueError, match="only test, train, validation"):
        SplitReader(small_dataset, "val")


@pytest.fixture
def damaged(small_dataset: Path, tmp_path: Path) -> Path:
    shutil.copytree(small_dataset, tmp_path / "copy")
    return tmp_path / "copy"


def first_shard(dataset: Path) -> Path:
    return dataset / "train" / "part-00000.parquet"


def test_a_missing_shard_is_named(damaged: Path) -> None:
    first_shard(damaged).unlink()
    with pytest.raises(FileNotFoundError, match="part-00000"):
        SplitReader(damaged, "train")


def test_a_truncated_shard_is_named(damaged: Path) -> None:
    shard = first_shard(damaged)
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"part-00000.*bytes, its manifest says"):
        SplitReader(damaged, "train")


def test_a_shard_that_is_not_parquet_is_named(damaged: Path) -> None:
    shard = first_shard(damaged)
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(ValueError, match=r"part-00000.*not Parquet"):
        SplitReader(damaged, "train")


def test_another_layout_is_refused_rather_than_misread(damaged: Path) -> None:
    shard = first_shard(damaged)
    table = pq.read_table(shard)
    groups = pq.read_metadata(shard).row_group(0).num_rows
    pq.write_table(table, shard, compression="snappy", row_group_size=groups)
    manifest = json.loads((damaged / "dataset.json").read_text())
    manifest["splits"]["train"]["shards"][0]["size"] = shard.stat().st_size
    (damaged / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="not one plain page"):
        SplitReader(damaged, "train")


def test_a_row_that_was_overwritten_is_an_error_not_pixels(damaged: Path) -> None:
    shard = first_shard(damaged)
    # The 4-byte length before the second value of the largest column.
    column = next(
        column
        for column in (pq.read_metadata(shard).row_group(0).column(i) for i in range(5))
        if column.path_in_schema == "bands_10m"
    )
    rows = pq.read_metadata(shard).row_group(0).num_rows
    width = len(pq.read_table(shard, columns=["bands_10m"])["bands_10m"][0].as_py())
    start = column.data_page_offset + column.total_uncompressed_size - rows * (4 + width)
    data = bytearray(shard.read_bytes())
    data[start + 4 + width] ^= 0xFF
    shard.write_bytes(data)
    reader = SplitReader(damaged, "train")
    with pytest.raises(ValueError, match=r"part-00000.*bands_10m.*row 1"):
        list(training_batches(reader, seed=0, epoch=0, global_batch_size=16))
