import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA, ArchiveIndex, index_table
from pipelines.dataset.prepare.identity import compare, index_digest, read_index, with_known_samples, write_index
from pipelines.storage.folder import Location


def samples(**rows: tuple[str, list[int]]) -> pa.Table:
    return index_table(
        {
            "id": list(rows),
            "split": [split for split, _ in rows.values()],
            "labels": [labels for _, labels in rows.values()],
            "paths": [[name] for name in rows],
        }
    )


BEFORE = samples(a=("train", [1]), b=("train", [2]), c=("test", [3]))


def test_the_digest_is_of_the_rows_and_not_of_their_chunks() -> None:
    digest = index_digest(BEFORE)
    assert digest == "b31461a5f1289813184a80cbc9d38983e5a0c6e8dcfb053c856b48683621ce37"
    assert [
        index_digest(same)
        for same in (pa.concat_tables([BEFORE.slice(0, 1), BEFORE.slice(1)]), BEFORE.take(pa.array(np.arange(3))))
    ] == [digest] * 2
    assert digest not in [
        index_digest(other) for other in (BEFORE.slice(1), samples(a=("train", [1]), b=("train", [2]), c=("test", [4])))
    ]


COLUMNS = {name: BEFORE[name] for name in ("id", "split", "labels", "paths")} | {
    "acquisition_date": pa.array([datetime.date(2017, 6, 13), None, datetime.date(2017, 6, 14)])
}


@pytest.fixture
def values_under_nulls() -> pa.Table:
    """Flags that are all null, although two of them have a value."""
    buffers = [pa.py_buffer(b"\0"), pa.array([0, 1, 2, 2], pa.int32()).buffers()[1]]
    kind, values = INDEX_SCHEMA.field("flags").type, pa.array(["snow", "snow"])
    return index_table({**COLUMNS, "flags": pa.Array.from_buffers(kind, 3, buffers, children=[values])})


def test_the_digest_is_not_of_what_lies_under_nulls(values_under_nulls: pa.Table, tmp_path: Path) -> None:
    write_index(values_under_nulls, Location.at(tmp_path))
    kept = read_index(Location.at(tmp_path))
    assert kept is not None
    assert kept.equals(values_under_nulls)
    assert index_digest(values_under_nulls) == index_digest(kept) == index_digest(index_table(COLUMNS))


def test_what_is_added_removed_changed_and_moved() -> None:
    now = samples(d=("train", [1]), c=("test", [4]), a=("test", [1]))
    both = now.filter(pc.is_in(now["id"], BEFORE["id"].combine_chunks()))
    assert [
        compare(BEFORE, now, {"a", "b", "c"}),
        compare(BEFORE, both, {"a", "b", "c"}),
        compare(both, now, {"b"}),
        compare(both, BEFORE.slice(2), {"b", "c"}),
        compare(BEFORE.slice(2), both.slice(0, 1), {"c"}),
        compare(BEFORE, samples(b=("train", [9]), a=("test", [1]), c=("test", [4])), {"b"}),
        compare(BEFORE, BEFORE.take(pa.array([2, 0, 1])), {"a", "b", "c"}),
    ] == [
        "1 samples added, 1 removed, 2 changed, for example d",
        "0 samples added, 1 removed, 2 changed, for example b",
        "1 samples added, 0 removed, 0 changed, for example d",
        "0 samples added, 1 removed, 1 changed, for example a",
        "0 samples added, 0 removed, 1 changed, for example c",
        "0 samples added, 0 removed, 2 changed, for example a",  # in another split it would be in another place
        "",
    ]


def test_what_is_known_of_files_that_are_gone_is_kept() -> None:
    gone = [{"id": name, "file": name, "reason": "missing folder", "detail": ""} for name in ("a", "d")]
    now = samples(d=("train", []), a=("test", []), c=("test", [3]))
    index = ArchiveIndex(now, REJECTED_SCHEMA.empty_table(), pa.Table.from_pylist(gone, REJECTED_SCHEMA))
    kept = with_known_samples(BEFORE, index).samples
    assert (kept["labels"].to_pylist(), kept["split"].to_pylist()) == ([[], [1], [3]], ["train", "test", "test"])
    assert kept.schema.equals(now.schema)


@pytest.mark.parametrize("damage", [b"", b"no Parquet"])
def test_a_damaged_index_is_lost(tmp_path: Path, damage: bytes) -> None:
    folder = Location.at(tmp_path)
    assert read_index(folder) is None
    write_index(BEFORE, folder)
    folder.write("_index.parquet", damage)
    assert read_index(folder) is None
