"""Images in a column of Parquet files."""

import errno
import io
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFile
from PIL import Image
from pyspark.sql import DataFrame, SparkSession

from conf.load import load, override
from conf.schema import RunConfig
from jobs.prepare import prepare
from pipelines.archives.archive import ArchiveDescription, BadRecordError, read_sample
from pipelines.archives.images.image_table import ImageTable
from pipelines.archives.images.parquet_files import INCOMPLETE, ParquetRows
from pipelines.dataset.prepare.identity import Identity, describe, index_digest, read_index, write_index
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.dataset.read.reader import SplitReader
from pipelines.sample import ImageGroup
from pipelines.storage.folder import Location, StorageError
from tests.pipelines.archives.files import check_bad_record, check_refused, fill, reasons, valid_index


def pixels(number: int, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (*size, 3), np.uint8)


def png(number: int, size: tuple[int, int] = (8, 8)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number, size)).save(file, "png")
    return file.getvalue()


def hugging_face(
    path: Path, labels: Sequence[Any], *, names: list[str] | None = None, first: int = 0, **columns: Any
) -> Path:
    """A file as `datasets` writes it, with row groups of three rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(first + row), "path": f"{row}.png"} for row in range(len(labels))]
    table = pa.table({"image": images, "label": list(labels), **columns})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=3)
    return path


def splits_of(archive: ImageTable) -> dict[str, int]:
    return dict(Counter(archive.index().samples["split"].to_pylist()))


def test_a_hugging_face_dataset(tmp_path: Path) -> None:
    names = ["cat", "ant", "bee"]
    hugging_face(tmp_path / "data" / "train-00000-of-00002.parquet", [2, 0, 1, 2, 0], names=names)
    hugging_face(tmp_path / "data" / "train-00001-of-00002.parquet", [1, 1, 0, 2, 0], names=names, first=5)
    hugging_face(tmp_path / "data" / "test-00000-of-00001.parquet", [1, -1], names=names, first=10)
    archive = ImageTable(str(tmp_path), validation_fraction=0.3)
    group = ImageGroup("rgb", (8, 8, 3), "uint8", ("red", "green", "blue"))
    assert archive.description == ArchiveDescription("table", "single_label", ("cat", "ant", "bee"), (group,))
    index = valid_index(archive)
    rows = {row["id"]: row for row in index.samples.to_pylist()}
    assert (rows["data/train-00000-of-00002.parquet#3"]["labels"], Counter(row["split"] for row in rows.values())) == (
        [2],
        {"train": 7, "validation": 3, "test": 1},
    )
    assert reasons(index.rejected.to_pylist()) == [("data/test-00000-of-00001.parquet#1", "no label")]
    travelled = pickle.loads(pickle.dumps(archive))
    for number, row in enumerate(sorted(name for name in rows if "train" in name)):
        np.testing.assert_array_equal(read_sample(travelled, rows[row]["paths"])["rgb"], pixels(number))


def labelled(root: Path, *columns: pa.Array) -> str:
    """A table whose files have these labels."""
    for number, labels in enumerate(columns):
        table = pa.table({"image": [png(row) for row in range(len(labels))], "label": labels})
        pq.write_table(table, root / f"{number}.parquet")
    return str(root)


TEXTS, MULTI_HOT = ["b", "a", "b"], [[1, 0, 0], [0, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize(
    ("columns", "settings", "classes", "found"),
    [
        ([pa.array(TEXTS).dictionary_encode()], {}, ("a", "b"), [[1], [0], [1]]),
        ([pa.array(TEXTS), pa.array(TEXTS, pa.large_string())], {}, ("a", "b"), [[1], [0], [1]] * 2),
        ([pa.array([5, 3], pa.int64()), pa.array([3], pa.int32())], {}, ("3", "5"), [[1], [0], [0]]),
        ([pa.array(MULTI_HOT)], {"labels": "multi_hot"}, ("0", "1", "2"), [[0], [1, 2]]),
        ([pa.array(MULTI_HOT).cast(pa.list_(pa.bool_()))], {}, ("0", "1", "2"), [[0], [1, 2]]),
        ([pa.array(MULTI_HOT)], {"labels": "indices"}, ("0", "1"), [[0, 1], [0, 1], [0]]),
        ([pa.array([[0], [1]])], {}, ("0", "1"), [[0], [1]]),
        ([pa.array([[0, 1], [1]])], {}, ("0", "1"), [[0, 1], [1]]),
    ],
)
def test_labels_are_read_by_what_they_mean(
    tmp_path: Path, columns: list[pa.Array], settings: dict[str, Any], classes: tuple[str, ...], found: list[list[int]]
) -> None:
    archive = ImageTable(labelled(tmp_path, *columns), **settings)
    assert (archive.description.class_names, archive.index().samples["labels"].to_pylist()) == (classes, found)


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        (MULTI_HOT, {}, r"has 3 numbers, which are 0 or 1: set archive\.labels=multi_hot .*archive\.labels=indices"),
        (
            [[1, 0], [1]],
            {"labels": "multi_hot"},
            r"0\.parquet row 1: .* has \[1\], expected 0 or 1 for each of 2 classes",
        ),
        ([[1, 0], [1, 2]], {"labels": "multi_hot"}, r"row 1: column 'label' has \[1, 2\], expected 0 or 1"),
        ([1, 0], {"labels": "multi_hot"}, "has no lists of integers: drop archive.labels"),
        ([True, False], {}, "is bool, expected a text, an integer, or a list"),
    ],
)
def test_labels_that_may_mean_two_things_are_refused(
    tmp_path: Path, labels: list[Any], settings: dict[str, Any], message: str
) -> None:
    check_refused(ImageTable(labelled(tmp_path, pa.array(labels)), **settings), message)


def test_more_classes_than_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="table: 32,768 classes, and at most 32,767 are possible"):
        ArchiveDescription("table", "single_label", tuple(map(str, range(2**15))), ())


@pytest.mark.parametrize("names", [["bee", "ant"], None])
def test_files_with_other_names_of_classes_are_refused(tmp_path: Path, names: list[str] | None) -> None:
    hugging_face(tmp_path / "train-0.parquet", [0, 1], names=["ant", "bee"])
    hugging_face(tmp_path / "train-1.parquet", [0, 1], names=names)
    words = ", ".join(names) if names else "without names"
    check_refused(ImageTable(str(tmp_path)), rf"train-1\.parquet: the classes of column 'label' are {words}, and in")


def test_files_that_would_not_be_read_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    hugging_face(root / "a" / "b" / "train-0.parquet", [0, 1])
    assert len(ImageTable(str(root)).index().samples) == 2
    elsewhere, link = hugging_face(tmp_path / "blobs" / "train-1.parquet", [0, 1]), root / "a" / "train-1.parquet"
    link.symlink_to(elsewhere)  # as in the cache of Hugging Face's hub
    check_refused(ImageTable(str(root)), rf"{link}: symbolic link to {elsewhere}, which is not read: put the file")
    link.unlink()
    split = root / "split=validation"
    split.symlink_to(elsewhere.parent)
    check_refused(ImageTable(str(root)), rf"^{split}: a symbolic link to {elsewhere.parent}, out of the archive")
    split.unlink()
    deep = hugging_face(root / "a" / "b" / "c" / "train-2.parquet", [0, 1])
    check_refused(ImageTable(str(root)), rf"{deep}: lies deeper than 2 folders below the archive")


@pytest.mark.parametrize(("scheme", "inside"), [("", ""), ("", "/a"), ("memory:/", "/a/b")])
@pytest.mark.parametrize(
    ("kind", "data", "log"),
    [
        ("a Delta", "train-0.parquet", "_delta_log/00000000000000000000.json"),
        ("an Iceberg", "data/train-0.parquet", "metadata/v1.metadata.json"),
    ],
)
def test_tables_with_a_log_are_refused(
    tmp_path: Path, scheme: str, inside: str, kind: str, data: str, log: str
) -> None:
    table = Location.at(f"{scheme}{tmp_path}/archive{inside}")
    for name in (data, log):
        table.make(str(Path(name).parent))
        table.write(name, b"")
    check_refused(
        ImageTable(f"{scheme}{tmp_path}/archive"), rf"^{table} is {kind} table, whose folder keeps removed rows: "
    )


def test_removed_rows_of_a_delta_table_do_not_come_back(tmp_path: Path) -> None:
    from deltalake import write_deltalake

    for labels in (["wrong", "wrong"], ["a", "b"]):
        images = [png(row) for row in range(2)]
        write_deltalake(tmp_path, pa.table({"image": images, "label": labels}), mode="overwrite")
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    check_refused(ImageTable(str(tmp_path)), "is a Delta table")


def test_a_folder_may_be_called_metadata(tmp_path: Path) -> None:
    hugging_face(tmp_path / "data" / "train-0.parquet", [0, 1])
    hugging_face(tmp_path / "metadata" / "train-1.parquet", [0, 1])
    (tmp_path / "metadata" / "about.json").write_text("{}")
    assert len(ImageTable(str(tmp_path)).index().samples) == 4


def test_a_file_that_was_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "train.parquet", list("abab"))
    np.testing.assert_array_equal(read_sample(ImageTable(str(path)), ["", "1"])["rgb"], pixels(1))
    path.unlink()
    hugging_face(path, list("abab"), first=7)
    np.testing.assert_array_equal(read_sample(ImageTable(str(path)), ["", "1"])["rgb"], pixels(8))


@pytest.mark.parametrize(
    ("settings", "names", "before", "now"),
    [
        ({"image": "sar"}, ["image_column"], ["image"], ["sar"]),
        ({"id": "key", "keep": ["site"]}, ["id_column", "kept_columns"], [None, None], ["key", ["key", "site"]]),
    ],
)
def test_the_columns_decide_the_rows(
    tmp_path: Path, settings: dict[str, Any], names: list[str], before: list[Any], now: list[Any]
) -> None:
    other = [{"bytes": png(row + 50), "path": ""} for row in range(4)]
    path = hugging_face(tmp_path / "train.parquet", list("abab"), sar=other, key=list("cdef"), site=[1.5] * 4)
    first, second = (
        Identity(describe(archive.description, archive.read_settings))
        for archive in (ImageTable(str(path)), ImageTable(str(path), **settings))
    )
    for one, other_one, there, wanted in ((first, second, before, now), (second, first, now, before)):
        assert one.differences(other_one) == [
            f"{name} {old} there, {new} asked for" for name, old, new in zip(names, there, wanted, strict=True)
        ]


def test_every_type_that_travels_keeps_its_values(tmp_path: Path) -> None:
    second = datetime(2024, 5, 6, 7, 8, 9, 123456)
    columns = {
        "a.b": (pa.array(["x", None], pa.large_string()), pa.string()),
        "c`d": (pa.array(["x", "y"]).dictionary_encode(), pa.string()),
        "count": (pa.array([2**32 - 1, None], pa.uint32()), pa.int64()),
        "share": (pa.array([0.1, None], pa.float32()), pa.float32()),
        "seen": (pa.array([True, None]), pa.bool_()),
        "day": (pa.array([second.date(), None]), pa.date32()),
        "local": (pa.array([second, None], pa.timestamp("ns")), pa.timestamp("us")),
        "utc": (pa.array([second, None], pa.timestamp("us", "Europe/Berlin")), pa.timestamp("us", "UTC")),
    }
    hugging_face(tmp_path / "x.parquet", [0, -1], ID=[9, 8], **{name: column for name, (column, _) in columns.items()})
    index = ImageTable(str(tmp_path), id="ID", keep=[*columns]).index()
    assert (index.samples["id"].to_pylist(), reasons(index.rejected.to_pylist())) == (["9"], [("8", "no label")])
    for name, (source, kind) in columns.items():
        column = index.samples[name]
        assert (column.type, column.cast(pa.string())[0]) == (kind, source[:1].cast(kind).cast(pa.string())[0]), name
    write_index(index.samples, Location.at(tmp_path))
    read = read_index(Location.at(tmp_path))
    assert read is not None
    assert index_digest(read) == index_digest(index.samples)
    hugging_face(tmp_path / "x.parquet", [0], local=pa.array([1], pa.timestamp("ns")))
    check_refused(ImageTable(str(tmp_path), keep=["local"]), r"from timestamp\[ns\] to timestamp\[us\] would lose data")


def test_plain_bytes_texts_and_a_column_of_splits(tmp_path: Path) -> None:
    splits = ["train"] * 6 + ["val"] * 2 + ["TEST"]
    table = {"img": [png(row) for row in range(9)], "kind": list("bababaabb"), "part": splits}
    pq.write_table(pa.table(table), tmp_path / "all.parquet")
    archive = ImageTable(str(tmp_path / "all.parquet"), image="img", label="kind", split="part")
    assert (archive.description.class_names, splits_of(archive)) == (
        ("a", "b"),
        {"train": 6, "validation": 2, "test": 1},
    )
    samples = archive.index().samples
    assert samples["labels"].to_pylist() == [[1], [0], [1], [0], [1], [0], [0], [1], [1]]
    np.testing.assert_array_equal(read_sample(archive, samples["paths"][8].as_py())["rgb"], pixels(8))


def test_folders_of_a_partitioned_table_say_the_split(tmp_path: Path) -> None:
    for folder, count in (("split=train", 6), ("split=val", 2), ("split=test", 3)):
        hugging_face(tmp_path / folder / "part-00000.snappy.parquet", ["a", "b", "a", "b", "a", "b"][:count])
    expected = {"train": 6, "validation": 2, "test": 3}
    assert (splits_of(ImageTable(str(tmp_path))), splits_of(ImageTable(str(tmp_path), split="split"))) == (
        expected,
        expected,
    )
    check_refused(ImageTable(str(tmp_path), split="part"), r"has no column 'part' \(archive\.split\)")
    (tmp_path / "split=train").rename(tmp_path / "split=holdout")
    check_refused(
        ImageTable(str(tmp_path), split="split"),
        r"column 'split' \(archive\.split\) has 'holdout', expected train",
    )


def test_lists_are_several_labels_and_splits_are_drawn(tmp_path: Path) -> None:
    labels = [["tree", "water"], ["water"], [], ["sand", "tree"], None, *[["sand"]] * 16]
    hugging_face(tmp_path / "part-0.parquet", labels)
    archive = ImageTable(str(tmp_path), split_fractions=(0.5, 0.25, 0.25))
    assert (archive.description.task, archive.description.class_names) == ("multi_label", ("sand", "tree", "water"))
    index = archive.index()
    assert ([row["labels"] for row in index.samples.to_pylist()][:3], index.rejected["detail"].to_pylist()) == (
        [[1, 2], [2], [0, 1]],
        ["[]", "None"],
    )
    assert splits_of(archive)["train"] == pytest.approx(10, abs=1)
    assert index.samples.equals(ImageTable(str(tmp_path), split_fractions=(0.5, 0.25, 0.25)).index().samples)


@pytest.mark.parametrize(
    ("splits", "settings"),
    [
        ([None], {"validation_fraction": 0.5}),
        (["train", "test"], {"split_fractions": (0.8, 0.1, 0.1)}),
        (["train", "validation"], {"validation_fraction": 0.5}),
        (["train", "validation"], {"seed": 5}),
    ],
)
def test_a_setting_without_effect_is_refused(
    tmp_path: Path, splits: list[str | None], settings: dict[str, Any]
) -> None:
    for number, split in enumerate(splits):
        hugging_face(tmp_path / f"{split or 'part'}-0.parquet", ["a", "b"] * 3, first=6 * number)
    check_refused(ImageTable(str(tmp_path), **settings), f"^{next(iter(settings))}=.* has no effect on {tmp_path}: it")


def test_images_are_scaled_where_asked_and_refused_where_sizes_differ(tmp_path: Path) -> None:
    images = [png(0, (8, 8)), png(1, (12, 8)), png(2, (9, 9)), png(3, (8, 8))]
    pq.write_table(pa.table({"image": images, "label": [0, 1, 0, 1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"different sizes \(8 x 8, .* set archive\.image_size"):
        _ = ImageTable(str(tmp_path)).description
    archive = ImageTable(str(tmp_path), image_size=6)
    assert (archive.description.groups[0].shape, read_sample(archive, ["x.parquet", "1"])["rgb"].shape) == (
        (6, 6, 3),
        (6, 6, 3),
    )


def test_bad_images_are_bad_records(tmp_path: Path) -> None:
    images = [{"bytes": png(0), "path": ""}, {"bytes": None, "path": "elsewhere.png"}, {"bytes": b"GIF89a", "path": ""}]
    pq.write_table(pa.table({"image": images, "label": [0, 1, 1]}), tmp_path / "x.parquet")
    archive = ImageTable(str(tmp_path), image_size=8)
    for row, reason in (("1", "no image bytes"), ("2", "not a readable JPEG or PNG")):
        with pytest.raises(BadRecordError) as caught:
            read_sample(archive, ["x.parquet", row])
        assert (caught.value.reason, caught.value.file) == (reason, f"{tmp_path}/x.parquet row {row}")
    check_bad_record(archive, ["gone.parquet", "0"], "missing file")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and no more")
    check_bad_record(archive, ["damaged.parquet", "0"], "not a readable Parquet file")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"image": "picture"},
            r"has no column 'picture' \(archive\.image\); its columns are image, label, part, empty, key, .*, size$",
        ),
        ({"id": "a.b"}, r"has no column 'a\.b' \(archive\.id\); its columns are image, label, part, "),
        ({"keep": ["part", "Part"]}, r"has no column 'Part' \(archive\.keep\); its columns are image, label, part, "),
        ({"id": "key"}, r"column 'key' \(archive\.id\) has 7 in 2 rows, expected another value in each row$"),
        ({"id": "null"}, r"column 'null' \(archive\.id\) has no value in 1 rows, expected another value in each row$"),
        (
            {"id": "Tile"},
            r"column 'Tile' \(archive\.id\) has a name that .* predictions use already: rename it$",
        ),
        ({"keep": ["part", "part", "size"]}, r"column 'size' \(archive\.keep\) has a name that datasets or predict"),
        ({"id": "image"}, r"'image' \(archive\.id\) is struct<.*, expected texts or integers below 2\*\*63$"),
        ({"keep": ["image"]}, r"'image' \(archive\.keep\) is struct<.*, expected .*, booleans, dates or timestamps$"),
        ({"label": "image"}, r"column 'image' \(archive\.label\) is struct<.*, expected a text, an integer, or a list"),
        ({"image": "label"}, r"column 'label' \(archive\.image\) is int64, expected the bytes of images"),
        ({"split": "part"}, r"column 'part' \(archive\.split\) has 'holdout', expected train"),
        ({"split": "empty"}, r"column 'empty' \(archive\.split\) has '', expected train, val"),
    ],
)
def test_columns_that_do_not_fit_are_one_line_with_the_setting(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    columns = {"key": [7, 7], "null": ["a", None], "Tile": ["a", "b"], "size": [1, 2]}
    hugging_face(tmp_path / "x.parquet", [0, 1], part=["train", "holdout"], empty=["train", ""], **columns)
    check_refused(ImageTable(str(tmp_path), **settings), message)


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ImageTable(str(tmp_path / "nowhere")).index()
    for name, labels, keys, message in (
        ("_temporary/x", [0], [0], r"holds no Parquet files, expected names that end with \.parquet"),
        ("test", [0, 1], [0, 1], "has no split train, only test"),
        ("more", [0, 1], [2, 3], r"the name of more\.parquet says no split, those of other files do"),
        ("train/x", [0, 1], [9, 2], r"^{}: column 'key' \(archive\.id\) has 2 in 2 rows, expected another value"),
        ("train/x", [0], ["4"], r"train/x\.parquet: column 'key' is of another type than in more\.parquet"),
        ("train/x", ["text"], [4], r"column 'label' is of another type than in more\.parquet"),
    ):
        hugging_face(tmp_path / f"{name}.parquet", labels, key=keys)
        check_refused(ImageTable(str(tmp_path), id="key"), message.format(tmp_path))


def test_row_groups_are_kept_while_they_fit(tmp_path: Path) -> None:
    path = str(hugging_face(tmp_path / "x.parquet", list(range(10))))
    rows = ParquetRows(cached_bytes=60)  # two groups of three labels, and the last one of one
    assert ([rows.value(path, row, "label", opened_as="") for row in (0, 9, 3, 8, 2, 5)], len(rows._groups)) == (
        [0, 9, 3, 8, 2, 5],
        2,
    )
    with pytest.raises(StopIteration):
        rows.value(path, 10, "label", opened_as="")


def test_behind_a_url(tmp_path: Path) -> None:
    local = hugging_face(tmp_path / "x.parquet", ["a", "b"] * 5)
    fsspec.filesystem("memory").pipe_file("/tables/data/train-0.parquet", local.read_bytes())
    archive = ImageTable("memory://tables")
    assert archive.description.class_names == ("a", "b")
    np.testing.assert_array_equal(read_sample(archive, ["data/train-0.parquet", "7"])["rgb"], pixels(7))


@pytest.mark.parametrize("error", [TimeoutError(), PermissionError("expired"), OSError(errno.EIO, "internal error")])
def test_a_storage_that_fails_is_no_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/failing/train-0.parquet", hugging_face(tmp_path / "x.parquet", ["a", "b"] * 5).read_bytes())
    memory.pipe_file("/failing/train-1.parquet", b"PAR1 damaged PAR1")

    archive, out = ImageTable("memory://failing"), {"rgb": np.zeros((8, 8, 3), np.uint8)}
    with pytest.raises(BadRecordError, match="not a readable Parquet file"):
        archive.read(["train-1.parquet", "0"], out)
    monkeypatch.setattr(MemoryFile, "read", Mock(side_effect=error))
    for read in (lambda: archive.read(["train-0.parquet", "7"], out), archive.index):
        with pytest.raises(StorageError, match=r"memory://failing/train-0\.parquet: cannot be read"):
            read()


@pytest.mark.spark
def test_a_table_is_prepared_and_read_like_every_archive(spark: SparkSession, tmp_path: Path) -> None:
    hugging_face(tmp_path / "in" / "train-0.parquet", [row % 3 for row in range(30)], names=["x", "y", "z"])
    archive = ImageTable(str(tmp_path / "in"), validation_fraction=0.2)
    manifest = prepare_dataset(spark, archive, tmp_path / "out", row_group_mib=1, row_groups_per_shard=1, seed=0)
    assert ({name: split.rows for name, split in manifest.splits.items()}, manifest.class_names) == (
        {"train": 24, "validation": 6},
        ("x", "y", "z"),
    )
    samples = SplitReader(str(tmp_path / "out"), "train").gather(np.arange(24))
    expected = {pixels(number).tobytes(): number % 3 for number in range(30)}
    assert [expected[image.tobytes()] for image in samples.images["rgb"]] == samples.targets.argmax(axis=1).tolist()


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    file = hugging_face(tmp_path / "train.parquet", [0, 1])
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    check_refused(ImageTable(str(tmp_path)), r"its Parquet files have no rows$")


@pytest.mark.spark
def test_a_dataframe_gives_the_dataset_of_the_same_files(spark: SparkSession, tmp_path: Path) -> None:
    splits = ["train"] * 24 + ["val"] * 6 + ["test"] * 3
    file = hugging_face(
        tmp_path / "in" / "part-00000.parquet", [row % 3 for row in range(33)], part=splits, other=splits
    )
    frame = spark.read.parquet(str(file)).coalesce(1)

    def config(name: str, root: Path) -> RunConfig:
        archive = {"kind": "table", "root": str(root), "split": "part"}
        return load(None, archive=archive, dataset={"path": str(tmp_path / name)}, prepare={"row_group_mib": 1})

    expected = prepare(config("of files", tmp_path / "in"))
    found = prepare(config("of a frame", tmp_path / "written"), table=frame)
    assert (found.class_names, found.task, {name: split.rows for name, split in found.splits.items()}) == (
        expected.class_names,
        expected.task,
        {"train": 24, "validation": 6, "test": 3},
    )
    for split, info in expected.splits.items():
        for shard in info.shards:
            read = [pq.read_table(tmp_path / name / shard.file) for name in ("of files", "of a frame")]
            assert read[0].equals(read[1]), f"{split}: {shard.file}"
    (written,) = (tmp_path / "written").glob("*.parquet")
    assert pq.read_schema(written).names == ["image", "label", "part"]
    # What is written stays: preparation continues from it, and another DataFrame needs another folder.
    assert prepare(config("of a frame", tmp_path / "written")).fingerprint == found.fingerprint
    written_before = r"archive\.root=.*/written is not empty, .* by `prepare` without `table`$"
    check_not_prepared(config("of a frame", tmp_path / "written"), frame, written_before)


def check_not_prepared(config: RunConfig, table: DataFrame | None, message: str) -> None:
    """Make sure that a preparation, perhaps of a DataFrame, is refused."""
    with pytest.raises(ValueError, match=message):
        prepare(config, table=table)


@pytest.mark.long
@pytest.mark.spark
def test_a_dataframe_that_cannot_be_prepared(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(b"x", 1)], "image binary, tag int").repartition(3)
    config = load(
        None, archive={"kind": "table", "root": str(tmp_path / "in")}, dataset={"path": str(tmp_path / "out")}
    )
    check_not_prepared(config, frame, r"^the DataFrame has no column 'label'; its columns are image, tag$")
    keyed = override(config, "archive.id=k.ey")
    for keys, found in ((["a", "b", "a"], "'a' in 2"), ([None, "b"], "no value in 1")):
        rows = spark.createDataFrame([(b"x", 1, key) for key in keys], "image binary, label int, `k.ey` string")
        check_not_prepared(keyed, rows, rf"^the DataFrame: column 'k\.ey' \(archive\.id\) has {found} rows, exp")
    for columns, message in (
        ("image binary, label double", r"column 'label' \(archive\.label\) is double, expected a text"),
        ("image string, label int", r"column 'image' \(archive\.image\) is string, expected the bytes of images"),
    ):
        check_not_prepared(config, spark.createDataFrame([], columns), rf"^the DataFrame: {message}")
    assert not (tmp_path / "in").exists()
    renamed = override(config, "archive.label=tag")
    check_not_prepared(renamed, frame.limit(0), r"^the DataFrame has no rows$")
    assert list((tmp_path / "in").iterdir()) == []
    foreign = fill(tmp_path / "foreign", "thesis.tex")
    for other, message in (
        (
            override(renamed, archive={"kind": "synthetic", "train": 4, "validation": 0, "test": 0}),
            r"^table is for archive\.kind=table, and archive\.kind is synthetic$",
        ),
        (
            override(renamed, f"archive.root={tmp_path}/out/in"),
            r"^dataset\.path .*/out contains the archive .*/out/in: choose a folder outside",
        ),
        (
            override(renamed, f"archive.root={tmp_path}/new", f"dataset.path={foreign}"),
            r"/foreign exists and is not a dataset: choose another dataset\.path",
        ),
    ):
        check_not_prepared(other, frame, message)
    assert not (tmp_path / "new").exists(), "nothing is written before"
    (tmp_path / "in" / INCOMPLETE).touch()
    for table, advice in ((frame, "or name another one$"), (None, "and prepare it")):
        told = rf"/in: a DataFrame was not written into it to its end: remove the folder, {advice}"
        check_not_prepared(renamed, table, told)
