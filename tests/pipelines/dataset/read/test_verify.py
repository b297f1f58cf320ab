import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.dataset.format.manifest import Shard, read_manifest
from pipelines.dataset.format.rows import fixed_fields
from pipelines.dataset.read.verify import CheckProgress, DatasetCheck, check_shard, verify_dataset
from pipelines.storage.folder import Location
from tests.pipelines.dataset.files import blank, flip_bit, shorten

pytestmark = pytest.mark.spark
EditManifest = Callable[[Path, Callable[[dict[str, Any]], None]], None]


@pytest.fixture
def shard(copied: Path) -> Path:
    """The first shard of the copy."""
    return copied / "train" / "part-00000.parquet"


def column(path: Path, name: str, row_group: int = 0) -> pq.ColumnChunkMetaData:
    chunks = pq.read_metadata(path).row_group(row_group)
    return next(c for i in range(chunks.num_columns) if (c := chunks.column(i)).path_in_schema == name)


def flip_last_value(shard: Path, name: str, row_group: int = 0) -> None:
    """Change a bit of the last row of a row group."""
    chunk = column(shard, name, row_group)
    flip_bit(shard, chunk.data_page_offset + chunk.total_compressed_size - 1)


def only_damage(check: DatasetCheck) -> str:
    (damaged,) = check.damaged
    assert damaged.file == "train/part-00000.parquet"
    assert not check.is_whole
    assert str(damaged) == f"{damaged.file} {damaged.damage}"
    return str(damaged.damage)


def test_a_prepared_dataset_is_whole(small_dataset: Path) -> None:
    seen: list[CheckProgress] = []
    check = verify_dataset(small_dataset, threads=2, progress=seen.append)
    assert (check.is_whole, check.rows, check.shards, [progress.done for progress in seen], seen[-1]) == (
        True,
        56,
        len(seen),
        sorted(progress.done for progress in seen),
        CheckProgress(56, 56, 0),
    )


@pytest.mark.parametrize(
    ("name", "row_group"),
    [("labels", 0), ("bands_10m", 0), ("bands_20m", 0), ("bands_60m", 0), ("crc32c", 0), ("bands_10m", 1)],
)
def test_one_flipped_bit_of_a_row_is_found(copied: Path, shard: Path, name: str, row_group: int) -> None:
    flip_last_value(shard, name, row_group)
    check, metadata = verify_dataset(copied), pq.read_metadata(shard)
    rows = sum(metadata.row_group(group).num_rows for group in range(row_group + 1))
    ids = pq.read_table(shard, columns=["id"])["id"].to_pylist()
    assert (only_damage(check), check.damaged[0].damaged_rows, check.problems) == (
        f"has 1 damaged rows of {len(ids)}: {rows - 1} (sample {ids[rows - 1]})",
        (rows - 1,),
        (),
    )


def test_a_changed_id_is_found(copied: Path, shard: Path) -> None:
    flip_last_value(shard, "id")
    assert only_damage(verify_dataset(copied)).startswith("has ids, metadata or checksums that are not")


@pytest.mark.parametrize("name", ["bands_10m", "labels"])
def test_a_changed_header_of_an_array_is_found(copied: Path, shard: Path, name: str) -> None:
    """A space before the header's line break: numpy reads the array all the same."""
    data = shard.read_bytes()
    place = data.index(b" \n", data.index(b"NUMPY", column(shard, name).data_page_offset))
    shard.write_bytes(data[:place] + b"\t" + data[place + 1 :])
    assert "another header than was written" in only_damage(verify_dataset(copied))


@pytest.mark.parametrize(
    ("change", "damage"), [(Path.unlink, "is missing"), (shorten, r"has \d+ bytes, its"), (blank, "cannot be read: ")]
)
def test_a_shard_that_is_lost_or_no_parquet_is_found(
    copied: Path, shard: Path, change: Callable[[Path], None], damage: str
) -> None:
    change(shard)
    check = verify_dataset(copied)
    assert re.match(damage, only_damage(check))
    assert check.problems == ()


def test_swapped_shards_are_found(copied: Path, edit_manifest: EditManifest) -> None:
    """Each row fits its checksum, but the test rows are where the training rows were."""

    def swap(manifest: dict[str, Any]) -> None:
        train, test = manifest["splits"]["train"]["shards"][-1], manifest["splits"]["test"]["shards"][-1]
        train["file"], test["file"] = test["file"], train["file"]
        train["size"], test["size"] = test["size"], train["size"]
        train["row_groups"], test["row_groups"] = test["row_groups"], train["row_groups"]

    edit_manifest(copied, swap)
    assert len(verify_dataset(copied).damaged) == 2


def test_repeated_ids_and_other_class_counts_are_problems(copied: Path, edit_manifest: EditManifest) -> None:
    shutil.copytree(copied / "test", copied / "leak")

    def change(manifest: dict[str, Any]) -> None:
        leak = [
            {**shard, "file": shard["file"].replace("test/", "leak/")} for shard in manifest["splits"]["test"]["shards"]
        ]
        manifest["splits"]["leak"] = {**manifest["splits"]["test"], "shards": leak}
        manifest["splits"]["train"]["class_counts"][3] += 1

    edit_manifest(copied, change)
    check = verify_dataset(copied)
    assert check.damaged == ()
    repeated, counts = check.problems
    assert repeated.startswith("12 ids are repeated: ")
    assert " in leak and test" in repeated or " in test and leak" in repeated
    stated = read_manifest(copied).splits["train"].class_counts[3]
    assert f"train has {stated - 1} samples of class" in counts


def test_a_file_that_may_not_be_read_is_no_damage(small_dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Location, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(PermissionError):
        check_shard(Location.at(small_dataset), read_manifest(small_dataset).splits["train"].shards[0], {})


def test_an_empty_split_is_whole(copied: Path, edit_manifest: EditManifest) -> None:
    edit_manifest(copied, lambda manifest: manifest["splits"].update(empty={"shards": [], "class_counts": [0] * 19}))
    assert verify_dataset(copied).is_whole


def test_a_check_of_one_shard_gives_what_is_in_it(small_dataset: Path) -> None:
    manifest = read_manifest(small_dataset)
    split, fields = manifest.splits["validation"], fixed_fields(manifest.groups, len(manifest.class_names))
    checks = [check_shard(Location.at(small_dataset), shard, fields) for shard in split.shards]
    assert (
        [check.damage for check in checks],
        np.sum([check.class_counts for check in checks], axis=0).tolist(),
        sum(len(check.ids) for check in checks),
    ) == ([None] * len(checks), list(split.class_counts), 12)
    other = Shard(**(split.shards[0].model_dump() | {"row_groups": (1,)}))
    assert "has row groups of" in str(check_shard(Location.at(small_dataset), other, fields).damage)
