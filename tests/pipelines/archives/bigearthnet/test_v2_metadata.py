from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.patch import dates_and_seasons, flag_lists
from pipelines.archives.bigearthnet.v2 import tiles
from pipelines.archives.bigearthnet.v2_metadata import FLAG_COLUMNS, class_indices, read_metadata
from pipelines.archives.checked_rows import CheckedRows
from pipelines.sample import SPLITS

TILE = "S2A_MSIL2A_20170101T000001_N9999_R001_T33UUP"
S1_NAME, GOOD_ID = "S1A_IW_GRDH_1SDV_20170101T165043_33UUP_9_10", f"{TILE}_00_90"


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Two well-formed rows, the first with changes."""
    first = {"patch_id": f"{TILE}_09_10", "labels": ["Pastures", "Arable land"], "split": "train", "s1_name": S1_NAME}
    second = {"patch_id": GOOD_ID, "labels": ["Urban fabric"], "split": "test", "s1_name": f"{S1_NAME[:-4]}0_90"}
    return [first | changes, second]


TABLE = pa.Table.from_pylist(rows())


def metadata(folder: Path, table: pa.Table | list[dict[str, Any]], name: str = "metadata.parquet") -> Path:
    pq.write_table(table if isinstance(table, pa.Table) else pa.Table.from_pylist(table), folder / name)
    return folder / name


def test_good_rows_are_sorted_by_id(tmp_path: Path) -> None:
    path = metadata(tmp_path, rows())
    patches = read_metadata([path])
    assert patches.rows.select(["id", "labels", "split", "file"]).to_pylist() == [
        {"id": GOOD_ID, "labels": ["Urban fabric"], "split": "test", "file": str(path)},
        {"id": f"{TILE}_09_10", "labels": ["Pastures", "Arable land"], "split": "train", "file": str(path)},
    ]
    assert patches.rejected().equals(REJECTED_SCHEMA.empty_table())


def test_classes_are_ascending_and_each_once() -> None:
    labels = pa.array([["Urban fabric"], ["Pastures", "Arable land", "Pastures"]])
    indices = class_indices(labels)
    assert (
        indices.type,
        indices.to_pylist(),
        class_indices(labels.slice(1)).to_pylist(),
        class_indices(labels.slice(0, 0)).to_pylist(),
    ) == (INDEX_SCHEMA.field("labels").type, [[18], [1, 15]], [[1, 15]], [])


@pytest.mark.parametrize(
    "encode",
    [
        lambda table: table.cast(
            pa.schema(
                [
                    ("patch_id", pa.large_string()),
                    ("labels", pa.large_list(pa.large_string())),
                    ("split", pa.large_string()),
                    ("s1_name", pa.large_string()),
                ]
            )
        ),
        lambda table: table.set_column(2, "split", table["split"].dictionary_encode()),
        lambda table: table.select(["split", "labels", "patch_id"]),
        lambda table: table.append_column("altitude", pa.array([1, 2])),
    ],
    ids=["large strings", "categorical", "other order", "more columns"],
)
def test_metadata_rewritten_by_other_software(tmp_path: Path, encode: Callable[[pa.Table], pa.Table]) -> None:
    plain = read_metadata([metadata(tmp_path, rows())])
    assert read_metadata([metadata(tmp_path, encode(TABLE))]).rows.to_pylist() == plain.rows.to_pylist()


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"patch_id": GOOD_ID}, "repeated id", ""),
        ({"patch_id": None}, "malformed id", ""),
        ({"patch_id": ""}, "malformed id", ""),
        ({"patch_id": "../../etc"}, "malformed id", "../../etc"),
        ({"patch_id": f"{TILE}_00_00/.."}, "malformed id", f"{TILE}_00_00/.."),
        ({"patch_id": f"../{TILE}_00_00"}, "malformed id", f"../{TILE}_00_00"),
        ({"patch_id": f"{TILE}_00_00\n"}, "malformed id", f"{TILE}_00_00\n"),
        ({"patch_id": f"{TILE}_00_00\0"}, "malformed id", f"{TILE}_00_00\0"),
        ({"patch_id": f"{TILE}_0_0"}, "malformed id", f"{TILE}_0_0"),
        ({"patch_id": "S2A_MSIL2A_20170613T101031_0_45"}, "malformed id", "S2A_MSIL2A_20170613T101031_0_45"),
        ({"patch_id": TILE.lower() + "_00_00"}, "malformed id", TILE.lower() + "_00_00"),
        (
            {"patch_id": TILE.replace("2017", "२०१७") + "_00_00"},
            "malformed id",
            TILE.replace("2017", "२०१७") + "_00_00",
        ),
        ({"split": "val"}, "unknown split", "val"),
        ({"split": None}, "unknown split", ""),
        ({"labels": []}, "no labels", ""),
        ({"labels": None}, "no labels", ""),
        ({"labels": ["Arable land", "Sea and ocean", "Dump sites"]}, "unknown label", "Sea and ocean"),
        ({"labels": ["Arable land", None]}, "unknown label", ""),
        ({"s1_name": None}, "malformed s1_name", ""),
        ({"s1_name": "../../x"}, "malformed s1_name", "../../x"),
        ({"s1_name": f"{S1_NAME}/.."}, "malformed s1_name", f"{S1_NAME}/.."),
    ],
)
def test_a_bad_row_is_rejected_and_the_other_stays(
    tmp_path: Path, changes: dict[str, Any], reason: str, detail: str
) -> None:
    path = metadata(tmp_path, rows(**changes))
    patches = read_metadata([path], sentinel1=True)
    assert patches.rows["id"].to_pylist() == [GOOD_ID]
    id = (rows(**changes)[0]["patch_id"]) or ""
    assert patches.rejected().schema.equals(REJECTED_SCHEMA)
    assert patches.rejected().to_pylist() == [{"id": id, "file": str(path), "reason": reason, "detail": detail}]


def test_the_first_of_repeated_ids_counts_across_files(tmp_path: Path) -> None:
    first = metadata(tmp_path, rows())
    second = metadata(tmp_path, [rows()[1] | {"split": "train"}, *rows(patch_id=f"{TILE}_01_01")[:1]], "more.parquet")
    patches = read_metadata([first, second])
    assert ({row["id"]: row["split"] for row in patches.rows.to_pylist()}, patches.rejected().to_pylist()) == (
        {
            GOOD_ID: "test",
            f"{TILE}_01_01": "train",
            f"{TILE}_09_10": "train",
        },
        [{"id": GOOD_ID, "file": str(second), "reason": "repeated id", "detail": ""}],
    )


def test_a_row_with_several_faults_is_rejected_once(tmp_path: Path) -> None:
    patches = read_metadata(
        [metadata(tmp_path, rows(patch_id="x", split="val", labels=[], s1_name=None))], sentinel1=True
    )
    assert patches.rejected()["reason"].to_pylist() == ["malformed id"]


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"metadata\.parquet: column labels, split is missing"):
        read_metadata([metadata(tmp_path, pa.table({"patch_id": [GOOD_ID]}))])
    without = TABLE.drop_columns(["s1_name"])
    assert len(read_metadata([metadata(tmp_path, without)]).rows) == 2
    with pytest.raises(ValueError, match=r"metadata\.parquet: column s1_name is missing"):
        read_metadata([metadata(tmp_path, without)], sentinel1=True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE.set_column(1, "labels", pa.array(["Pastures", "Pastures"])), r"not BigEarthNet v2\.0 metadata"),
        (TABLE.set_column(2, "split", pa.array([b"tr\xff", b"test"]).view(pa.string())), r"not BigEarthNet v2\.0 meta"),
        (TABLE.slice(0, 0), "has no rows"),
    ],
    ids=["another type", "no UTF-8", "empty"],
)
def test_tables_that_are_no_metadata(tmp_path: Path, table: pa.Table, message: str) -> None:
    with pytest.raises(ValueError, match=rf"metadata\.parquet: {message}"):
        read_metadata([metadata(tmp_path, table)])


@pytest.mark.parametrize("keep", [0, 7, -5])
def test_truncated_metadata(tmp_path: Path, keep: int) -> None:
    path = metadata(tmp_path, rows())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"metadata\.parquet: not BigEarthNet v2\.0 metadata, download it again"):
        read_metadata([path])


@pytest.fixture(scope="module")
def official(shared_data: Path) -> tuple[list[Path], CheckedRows]:
    """The published metadata, and what is read of it."""
    files = [
        shared_data / "bigearthnet_v2_full_metadata" / f"{name}.parquet"
        for name in ("metadata", "metadata_for_patches_with_snow_cloud_or_shadow")
    ]
    return files, read_metadata(files, sentinel1=True)


def test_the_complete_official_metadata_is_accepted(official: tuple[list[Path], CheckedRows]) -> None:
    files, patches = official
    assert len(patches.rejected()) == 0
    counts = {}
    for file in files:
        from_file = patches.rows.filter(pc.equal(patches.rows["file"], str(file)))["split"]
        counts[file.stem] = [pc.sum(pc.equal(from_file, split)).as_py() for split in SPLITS]
    assert list(counts.values()) == [[237_871, 122_342, 119_825], [34_673, 17_235, 17_542]]
    published = pa.concat_tables([pq.read_table(file) for file in files]).sort_by("patch_id")
    assert patches.rows["id"].equals(published["patch_id"])
    labels = published["labels"].combine_chunks()
    assert set(labels.flatten().unique().to_pylist()) == set(BIGEARTHNET_19)
    # The published lists are alphabetical, so ascending indices must give the very same sequence.
    indices = class_indices(patches.rows["labels"].combine_chunks())
    assert pa.array(BIGEARTHNET_19).take(indices.flatten()).equals(labels.flatten())
    assert pc.list_value_length(indices).equals(pc.list_value_length(labels))


def test_the_columns_of_the_official_metadata(official: tuple[list[Path], CheckedRows]) -> None:
    rows = official[1].rows
    assert rows["country"].null_count == 0
    flags = flag_lists(*(rows[name].combine_chunks() for name in FLAG_COLUMNS))
    counts = pc.value_counts(pc.binary_join(flags.cast(pa.list_(pa.string())), ","))
    assert {row["values"]: row["counts"] for row in counts.to_pylist()} == {
        "": 480_038,
        "snow": 60_773,
        "cloud_or_shadow": 8_677,
    }
    columns = dates_and_seasons(rows["id"])
    assert (columns["acquisition_date"].null_count, set(pc.unique(columns["season"]).to_pylist())) == (
        0,
        {"winter", "spring", "summer", "autumn"},
    )
    assert pc.all(pc.match_substring_regex(tiles(rows["id"]), "^[0-9]{2}[A-Z]{3}$")).as_py()
