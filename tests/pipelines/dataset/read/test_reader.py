import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipelines.archives.archive import read_sample
from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.dataset.format.layout import PARQUET_OPTIONS
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.read.reader import (
    Batch,
    ReaderSettings,
    SplitReader,
    Verify,
    check_readable,
    evaluation_batches,
    training_batches,
)
from pipelines.storage.folder import Location
from tests.patience import wait_until
from tests.pipelines.dataset.files import blank, flip_bit, shorten, upload

pytestmark = pytest.mark.spark
EditManifest = Callable[[Path, Callable[[dict[str, Any]], None]], None]


@pytest.fixture(scope="module", autouse=True, params=["C++", "Python"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows are read in C++, and in Python as where there is no library."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "Python":
            patch.setattr("pipelines.dataset.read.reader.make_gather", lambda columns: None)
        yield


@pytest.fixture(scope="module")
def reader(way: None, small_dataset: Path) -> SplitReader:
    return SplitReader(small_dataset, "train")


def key(batch: Batch) -> list[bytes]:
    """One digest-like value per sample: its coarsest bands."""
    return [image.tobytes() for image in batch.images["bands_60m"]]


def test_rows_are_the_archives_pixels(reader: SplitReader, small_archive: Path) -> None:
    archive = BigEarthNetV2(str(small_archive))
    samples = {sample["id"]: sample for sample in archive.index().samples.to_pylist()}
    rows = np.array([5, 0, 31, 5])
    batch = reader.gather(rows)
    assert (batch.rows.tolist(), batch.targets.shape) == (rows.tolist(), (4, 19))
    for place, row in enumerate(rows):
        sample = samples[reader.ids()[row]]
        assert np.flatnonzero(batch.targets[place]).tolist() == sample["labels"]
        for name, image in read_sample(archive, sample["paths"]).items():
            assert batch.images[name].dtype == np.uint16
            np.testing.assert_array_equal(batch.images[name][place], image)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(reader: SplitReader, size: int) -> None:
    alone = [key(batch) for batch in training_batches(reader, seed=1, epoch=2, global_batch_size=12)]
    parts = [
        [key(batch) for batch in training_batches(reader, seed=1, epoch=2, global_batch_size=12, rank=rank, size=size)]
        for rank in range(size)
    ]
    assert {len(part) for part in parts} == {2}
    for step, whole in enumerate(alone):
        assert [sample for part in parts for sample in part[step]] == whole


def test_resuming_gives_what_would_have_come_and_reads_nothing_else(
    small_dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SplitReader(small_dataset, "train")
    whole = [key(batch) for batch in training_batches(reader, seed=0, epoch=0, global_batch_size=8)]
    gathered, gather = [], reader.gather
    monkeypatch.setattr(reader, "gather", lambda rows, *rest: gathered.extend(rows) or gather(rows, *rest))
    rest = training_batches(reader, seed=0, epoch=0, global_batch_size=8, start_step=2)
    assert ([key(batch) for batch in rest], len(gathered)) == (whole[2:], 16)


@pytest.mark.parametrize(("size", "batch_size"), [(1, 32), (1, 5), (2, 7), (3, 4), (5, 64)])
def test_evaluation_sees_every_sample_once(reader: SplitReader, size: int, batch_size: int) -> None:
    seen, rows = [], []
    for rank in range(size):
        for batch in evaluation_batches(reader, batch_size=batch_size, rank=rank, size=size):
            assert len(batch.targets) == batch_size
            real = batch.weights == 1
            rows += batch.rows[real].tolist()
            seen += [sample for sample, weight in zip(key(batch), batch.weights, strict=True) if weight]
    assert (rows, seen) == (list(range(32)), key(reader.gather(np.arange(32))))


def check_threads_end() -> None:
    """Assert that the reader's threads end within a minute."""
    wait_until(lambda: not any(thread.name.startswith("groundswell-rea") for thread in threading.enumerate()))


@pytest.mark.parametrize("taken", [0, 1, 16])
def test_threads_end_with_their_consumer(reader: SplitReader, taken: int) -> None:
    batches = training_batches(reader, seed=0, epoch=0, global_batch_size=2)
    for _ in range(taken):
        next(batches)
    del batches
    check_threads_end()


def test_batches_that_are_kept_stay_as_they_were(reader: SplitReader) -> None:
    kept = list(training_batches(reader, seed=0, epoch=0, global_batch_size=2))
    fresh = [key(batch) for batch in training_batches(reader, seed=0, epoch=0, global_batch_size=2)]
    assert [key(batch) for batch in kept] == fresh


def test_memory_and_descriptors_do_not_grow(reader: SplitReader) -> None:
    pool = reader.pool(4)

    def epochs(first: int) -> tuple[int, int]:
        for epoch in range(first, first + 10):
            for batch in training_batches(reader, seed=0, epoch=epoch, global_batch_size=4, pool=pool):
                assert len(batch.targets) == 4
        return pool.created, psutil.Process().num_fds()

    first = epochs(0)
    assert epochs(10) == first
    assert first[0] <= 8


def test_a_missing_split_lists_the_others(small_dataset: Path) -> None:
    with pytest.raises(ValueError, match="only test, train, validation"):
        SplitReader(small_dataset, "val")


def first_shard(dataset: Path) -> Path:
    return dataset / "train" / "part-00000.parquet"


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (Path.unlink, FileNotFoundError, r"part-00000.parquet is missing: the same `groundswell prepare`"),
        (shorten, ValueError, r"part-00000.*bytes, its manifest says"),
        (blank, ValueError, r"part-00000.*not Parquet"),
    ],
)
def test_a_shard_that_is_lost_or_no_parquet_is_named_in_ranks_and_on_the_driver(
    copied: Path, harm: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    harm(first_shard(copied))
    with pytest.raises(error, match=message):
        SplitReader(copied, "train")
    with pytest.raises(error, match=message):
        check_readable(copied, read_manifest(copied), ["train"], ReaderSettings())


def test_a_manifest_of_other_rows_is_named(copied: Path, edit_manifest: EditManifest) -> None:
    def add_row(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"]["shards"][0]["row_groups"][0] += 1

    edit_manifest(copied, add_row)
    with pytest.raises(ValueError, match=r"part-00000.*its manifest says"):
        SplitReader(copied, "train")


def test_a_shard_that_is_truncated_while_it_is_read_is_an_error(copied: Path) -> None:
    reader = SplitReader(copied, "train")
    os.truncate(first_shard(copied), 4096)
    with pytest.raises(ValueError, match=r"part-00000.parquet, row group [01], row \d+ .* was truncated"):
        list(training_batches(reader, seed=0, epoch=0, global_batch_size=16))
    check_threads_end()


def column_start(shard: Path, name: str) -> tuple[int, int]:
    """Byte of the first value's length prefix, and the bytes from value to value."""
    row_group = pq.read_metadata(shard).row_group(0)
    column = next(
        column
        for column in (row_group.column(i) for i in range(row_group.num_columns))
        if column.path_in_schema == name
    )
    stride = 4 + len(pq.read_table(shard, columns=[name])[name][0].as_py())
    return column.data_page_offset + column.total_uncompressed_size - row_group.num_rows * stride, stride


def flip_pixel(shard: Path, row: int = 1) -> None:
    """Change one bit of one pixel of the first row group."""
    start, stride = column_start(shard, "bands_20m")
    flip_bit(shard, start + (row + 1) * stride - 7, 4)


DAMAGED_ROW = (
    r"train/part-00000.parquet, row group 0, row 1 \(sample {}\) is damaged: the row's checksum is \w+, stored is "
)


@pytest.mark.parametrize("verify", ["first_epoch", "always"])
def test_a_flipped_bit_is_an_error_that_names_the_sample(copied: Path, reader: SplitReader, verify: Verify) -> None:
    flip_pixel(first_shard(copied))
    checking = SplitReader(copied, "train", ReaderSettings(verify=verify))
    message = DAMAGED_ROW.format(reader.ids()[1]) + r".*prepare.verify=true.*`groundswell prepare`"
    with pytest.raises(ValueError, match=message):
        list(training_batches(checking, seed=0, epoch=0, global_batch_size=2))
    check_threads_end()
    with pytest.raises(ValueError, match=message):  # a failed row counts as unchecked
        checking.gather(np.array([1]))


def test_without_verification_a_flipped_bit_is_read(copied: Path, reader: SplitReader) -> None:
    flip_pixel(first_shard(copied))
    trusting = SplitReader(copied, "train", ReaderSettings(verify="never"))
    found, expected = (r.gather(np.array([1])).images["bands_20m"] for r in (trusting, reader))
    assert np.unpackbits(np.bitwise_xor(found, expected).view(np.uint8)).sum() == 1


@pytest.mark.parametrize(
    ("verify", "ends"),
    [("first_epoch", nullcontext()), ("always", pytest.raises(ValueError, match=DAMAGED_ROW.format(r"\w+")))],
)
def test_a_row_is_checked_the_first_time_or_always(
    copied: Path, verify: Verify, ends: AbstractContextManager[object]
) -> None:
    checking, rows = SplitReader(copied, "train", ReaderSettings(verify=verify)), np.array([0, 1])
    checking.gather(rows)
    flip_pixel(first_shard(copied))
    with ends:
        checking.gather(rows)


def test_batches_before_the_damaged_one_arrive_and_the_error_ends_the_threads(
    copied: Path, reader: SplitReader
) -> None:
    flip_pixel(first_shard(copied))
    batches = training_batches(SplitReader(copied, "train"), seed=0, epoch=0, global_batch_size=2)
    order = [batch.rows.tolist() for batch in training_batches(reader, seed=0, epoch=0, global_batch_size=2)]
    for rows in order[: next(number for number, rows in enumerate(order) if 1 in rows)]:
        assert next(batches).rows.tolist() == rows
    with pytest.raises(ValueError, match="row 1 "):
        next(batches)
    check_threads_end()


def test_a_file_that_is_replaced_while_it_is_open_is_read_as_it_was(copied: Path, reader: SplitReader) -> None:
    """A repair renames a new file over the old one; the open one stays readable."""
    again, other = SplitReader(copied, "train"), copied / "other"
    other.write_bytes(bytes(first_shard(copied).stat().st_size))
    other.replace(first_shard(copied))
    assert key(again.gather(np.arange(32))) == key(reader.gather(np.arange(32)))


def test_a_row_that_ends_within_a_value_is_a_truncated_file(copied: Path) -> None:
    again = SplitReader(copied, "train")
    start, stride = column_start(first_shard(copied), "bands_60m")
    os.truncate(first_shard(copied), start + stride + stride // 2)
    with pytest.raises(ValueError, match=r"row group 0, row 1 \(its id is unreadable\).*truncated.*writes this shard"):
        again.gather(np.array([0, 1]))


def test_an_error_of_the_system_names_the_file(copied: Path) -> None:
    again, folder = SplitReader(copied, "train"), os.open(copied, os.O_RDONLY)
    os.dup2(folder, again._files.row_group(0).file.descriptor)  # reading a folder is an error
    os.close(folder)
    with pytest.raises(OSError, match=r"Is a directory in row group 0: .*part-00000.parquet"):
        again.gather(np.array([0]))


def test_other_widths_than_the_manifest_says_are_named(
    copied: Path, edit_manifest: EditManifest, tmp_path: Path
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["groups"][2]["shape"] = [10, 40, 2]

    edit_manifest(copied, change)
    again = SplitReader(copied, "train", ReaderSettings(cache_folder=tmp_path / "cache"))
    with pytest.raises(
        ValueError, match=r"row group 0 cannot be read: column 'bands_60m' holds uint16 \(20, 20, 2\) at"
    ):
        again.gather(np.array([0]))


def rewrite(dataset: Path, edit_manifest: EditManifest, write: Callable[[Path], None]) -> None:
    """The training shards as another program would write them, and a manifest that says so."""

    def change(manifest: dict[str, Any]) -> None:
        for shard in manifest["splits"]["train"]["shards"]:
            path = dataset / shard["file"]
            write(path)
            metadata = pq.read_metadata(path)
            shard["row_groups"] = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            shard["size"] = path.stat().st_size

    edit_manifest(dataset, change)


def nullable(path: Path, **options: object) -> None:
    table = pq.read_table(path)
    schema = pa.schema([pa.field(field.name, field.type, nullable=True) for field in table.schema])
    pq.write_table(table.cast(schema), path, row_group_size=6, **options)


def compress(dataset: Path, edit_manifest: EditManifest) -> None:
    rewrite(dataset, edit_manifest, partial(nullable, compression="snappy"))


def test_row_groups_of_one_row(copied: Path, reader: SplitReader, edit_manifest: EditManifest) -> None:
    rewrite(
        copied,
        edit_manifest,
        lambda path: pq.write_table(pq.read_table(path), path, row_group_size=1, **PARQUET_OPTIONS),
    )
    again = SplitReader(copied, "train")
    assert (again.group_rows, again.window_rows, key(again.gather(np.arange(32)))) == (
        [1] * 32,
        None,
        key(reader.gather(np.arange(32))),
    )


def test_an_empty_split(copied: Path, edit_manifest: EditManifest) -> None:
    path = copied / "test" / "empty.parquet"
    pq.ParquetWriter(path, pq.read_schema(first_shard(copied)), **PARQUET_OPTIONS).close()
    shard = {"file": "test/empty.parquet", "row_groups": [], "size": path.stat().st_size, "content_digest": "0"}
    edit_manifest(
        copied, lambda manifest: manifest["splits"].update(empty={"shards": [shard], "class_counts": [0] * 19})
    )
    empty = SplitReader(copied, "empty")
    assert (len(empty), empty.ids(), list(evaluation_batches(empty, batch_size=4, rank=1, size=3))) == (0, [], [])
    assert list(training_batches(empty, seed=0, epoch=0, global_batch_size=4)) == []


@pytest.fixture
def settings(tmp_path: Path) -> ReaderSettings:
    """With a cache of its own."""
    return ReaderSettings(cache_folder=tmp_path / "cache")


@pytest.mark.parametrize("options", [{"compression": "snappy"}, {"compression": "none", "use_dictionary": True}])
def test_another_layout_is_rewritten_once(
    copied: Path,
    reader: SplitReader,
    settings: ReaderSettings,
    edit_manifest: EditManifest,
    options: dict[str, object],
) -> None:
    rewrite(copied, edit_manifest, partial(nullable, **options))
    expected = [key(batch) for batch in training_batches(reader, seed=0, epoch=0, global_batch_size=8)]
    written = []
    for _ in range(2):
        again = SplitReader(copied, "train", settings)
        assert again.window_rows is None
        assert [key(batch) for batch in training_batches(again, seed=0, epoch=0, global_batch_size=8)] == expected
        written.append({path: path.stat().st_ino for path in settings.cache_folder.glob("*.parquet")})
    assert (len(written[0]), written[0]) == (len(again.group_rows), written[1])


@pytest.fixture(scope="module")
def written_by_spark(spark: SparkSession, small_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spark")
    for shard in (small_dataset / "train").glob("part-*"):
        spark.read.parquet(str(shard)).coalesce(1).write.parquet(str(folder / shard.name))
    return folder


def test_files_that_spark_wrote_are_read(
    written_by_spark: Path, copied: Path, reader: SplitReader, settings: ReaderSettings, edit_manifest: EditManifest
) -> None:
    rewrite(
        copied,
        edit_manifest,
        lambda path: shutil.copy(next((written_by_spark / path.name).glob("part-*.parquet")), path),
    )
    assert key(SplitReader(copied, "train", settings).gather(np.arange(32))) == key(reader.gather(np.arange(32)))


def sizes_of(cache: Path) -> list[int]:
    """Bytes of the files in a cache from which a thread removes files meanwhile."""
    sizes = []
    for path in cache.glob("*.parquet"):
        with suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return sizes


def test_a_dataset_larger_than_the_cache_is_read_in_windows(
    copied: Path, tmp_path: Path, edit_manifest: EditManifest
) -> None:
    compress(copied, edit_manifest)
    whole = SplitReader(copied, "train", ReaderSettings(cache_folder=tmp_path / "whole"))
    limit = 3 * max(whole.group_rows) * whole.row_bytes
    assert limit < len(whole) * whole.row_bytes
    small = SplitReader(copied, "train", ReaderSettings(cache_folder=tmp_path / "cache", cache_limit_bytes=limit))
    assert small.window_rows == max(whole.group_rows)
    seen: list[bytes] = []
    for batch in training_batches(small, seed=0, epoch=0, global_batch_size=4):
        seen += key(batch)
        sizes = sizes_of(tmp_path / "cache")
        # The footer and the file's other ends come on top of the rows.
        assert sum(sizes) <= limit + 4096 * len(sizes)
    assert sorted(seen) == sorted(key(whole.gather(np.arange(32))))


def test_a_cache_smaller_than_three_row_groups_is_refused_on_the_driver_and_in_ranks(
    copied: Path, tmp_path: Path, edit_manifest: EditManifest
) -> None:
    compress(copied, edit_manifest)
    settings = ReaderSettings(cache_folder=tmp_path / "cache", cache_limit_bytes=1 << 20)
    message = r"reader.cache_limit_gib=0.000977 is less than three row groups of .*/copy"
    with pytest.raises(ValueError, match=message):
        check_readable(copied, read_manifest(copied), ["train", "validation"], settings)
    with pytest.raises(ValueError, match=message):
        SplitReader(copied, "train", settings)
    assert not settings.cache_folder.exists()
    check_readable(copied, read_manifest(copied), ["validation"], settings)


def test_a_compressed_shard_that_is_damaged_is_named(copied: Path, tmp_path: Path, edit_manifest: EditManifest) -> None:
    compress(copied, edit_manifest)
    shard = first_shard(copied)
    data = bytearray(shard.read_bytes())
    data[100:5000] = bytes(4900)
    shard.write_bytes(data)
    reader = SplitReader(copied, "train", ReaderSettings(cache_folder=tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"part-00000.parquet, row group 0 cannot be read"):
        list(training_batches(reader, seed=0, epoch=0, global_batch_size=16))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


@pytest.fixture
def cached(copied: Path, settings: ReaderSettings, edit_manifest: EditManifest) -> Path:
    """A compressed copy of the dataset, read once through a cache."""
    compress(copied, edit_manifest)
    SplitReader(copied, "train", settings).gather(np.arange(32))
    return copied


def test_a_flipped_bit_in_the_cache_is_found_and_the_entry_fetched_again(
    cached: Path, settings: ReaderSettings, reader: SplitReader, caplog: pytest.LogCaptureFixture
) -> None:
    again, good = SplitReader(cached, "train", settings), reader.gather(np.arange(32))
    pixels = good.images["bands_20m"][1].tobytes()
    (entry,) = [path for path in settings.cache_folder.glob("*.parquet") if pixels in path.read_bytes()]
    flip_pixel(entry)
    assert key(again.gather(np.arange(32))) == key(good)
    assert f"{entry} is damaged in the cache" in caplog.text
    whole = again.gather(np.arange(32)).images["bands_20m"]
    np.testing.assert_array_equal(whole, good.images["bands_20m"])
    # What another process finds is whole again.
    trusting = SplitReader(cached, "train", replace(settings, verify="never"))
    np.testing.assert_array_equal(trusting.gather(np.arange(32)).images["bands_20m"], whole)


def test_an_entry_that_is_truncated_under_the_reader_is_fetched_again(
    cached: Path, settings: ReaderSettings, reader: SplitReader
) -> None:
    again = SplitReader(cached, "train", settings)
    again.gather(np.arange(32))
    for entry in settings.cache_folder.glob("*.parquet"):
        os.truncate(entry, 1000)
    assert key(again.gather(np.arange(32))) == key(reader.gather(np.arange(32)))


@pytest.mark.parametrize("verify", ["never", "first_epoch", "always"])
def test_a_row_that_is_damaged_in_the_compressed_file_does_not_pass_the_cache(
    copied: Path, reader: SplitReader, settings: ReaderSettings, edit_manifest: EditManifest, verify: Verify
) -> None:
    flip_pixel(first_shard(copied))
    compress(copied, edit_manifest)
    for _ in range(2):
        again = SplitReader(copied, "train", replace(settings, verify=verify))
        with pytest.raises(ValueError, match=DAMAGED_ROW.format(reader.ids()[1])):
            again.gather(np.arange(32))


def test_a_dataset_on_an_object_store_is_read_through_the_cache(
    small_dataset: Path, reader: SplitReader, settings: ReaderSettings, s3_folder: str
) -> None:
    remote = SplitReader(upload(small_dataset, s3_folder), "train", settings)
    assert remote.ids() == reader.ids()
    for epoch in range(2):
        assert [key(batch) for batch in training_batches(remote, seed=0, epoch=epoch, global_batch_size=8)] == [
            key(batch) for batch in training_batches(reader, seed=0, epoch=epoch, global_batch_size=8)
        ]
    assert len(list(settings.cache_folder.glob("*.parquet"))) == len(reader.group_rows)
    # What is in the cache needs no store any more; what is not is missed with its name.
    shard = remote.manifest.splits["train"].shards[0].file
    Location.at(s3_folder).remove(shard)
    assert key(remote.gather(np.arange(32))) == key(reader.gather(np.arange(32)))
    with pytest.raises(FileNotFoundError, match=rf"{s3_folder}/{shard} is missing"):
        SplitReader(s3_folder, "train", settings)


def test_a_shard_that_goes_missing_on_the_store_is_named(
    small_dataset: Path, settings: ReaderSettings, s3_folder: str
) -> None:
    remote = SplitReader(upload(small_dataset, s3_folder), "train", settings)
    shard = remote.manifest.splits["train"].shards[0].file
    Location.at(s3_folder).remove(shard)
    with pytest.raises(ValueError, match=rf"{s3_folder}/{shard}, row group \d cannot be read"):
        list(training_batches(remote, seed=0, epoch=0, global_batch_size=8))
