import numpy as np
import pyarrow as pa
import pytest

from pipelines.archives.archive import REJECTED_SCHEMA, ArchiveIndex, index_table
from pipelines.dataset.index import compare, index_digest, keep_known, read_index, write_index
from pipelines.storage import Folder


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
    assert digest == index_digest(pa.concat_tables([BEFORE.slice(0, 1), BEFORE.slice(1)]))
    assert digest == index_digest(BEFORE.take(pa.array(np.arange(3))))
    assert digest != index_digest(BEFORE.slice(1))
    assert digest != index_digest(samples(a=("train", [1]), b=("train", [2]), c=("test", [4])))


def test_what_is_added_removed_changed_and_moved() -> None:
    now = samples(d=("train", [1]), c=("test", [4]), a=("test", [1]))
    changes = compare(BEFORE, now)
    assert (changes.added, changes.removed, changes.changed, changes.moved) == (["d"], ["b"], ["a", "c"], ["a"])
    assert str(changes) == "1 samples added, 1 removed, 2 changed, for example d"
    assert changes.of({"b"}).changed == ["a"]  # in another split it would be in another place
    assert not compare(BEFORE, BEFORE.take(pa.array([2, 0, 1])))


def test_what_is_known_of_files_that_are_gone_is_kept() -> None:
    gone = [{"id": name, "file": name, "reason": "missing folder", "detail": ""} for name in ("a", "d")]
    now = samples(d=("train", []), a=("test", []), c=("test", [3]))
    index = ArchiveIndex(now, REJECTED_SCHEMA.empty_table(), pa.Table.from_pylist(gone, REJECTED_SCHEMA))
    kept = keep_known(BEFORE, index).samples
    assert kept["labels"].to_pylist() == [[], [1], [3]]
    assert kept["split"].to_pylist() == ["train", "test", "test"]
    assert kept.schema.equals(now.schema)


@pytest.mark.parametrize("damage", [None, b"", b"no Parquet"])
def test_a_kept_index_is_the_same_or_lost(tmp_path: object, damage: bytes | None) -> None:
    folder = Folder.at(str(tmp_path))
    assert read_index(folder) is None
    write_index(BEFORE, folder)
    if damage is None:
        found = read_index(folder)
        assert found is not None
        assert found.equals(BEFORE)
        assert index_digest(found) == index_digest(BEFORE)
    else:
        folder.write("_index.parquet", damage)
        assert read_index(folder) is None
