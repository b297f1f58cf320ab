import pyarrow as pa

from pipelines.archives.archive import REJECTED_SCHEMA
from pipelines.archives.checked_rows import CheckedRows


def rows() -> pa.Table:
    return pa.table({"id": ["d", None, "b", "a"], "file": ["one", "one", "two", "two"], "value": [1, 2, 3, 4]})


def test_rows_leave_once_with_a_reason() -> None:
    patches = CheckedRows(rows())
    patches.reject(pa.array([False, None, False, False]), "null counts as bad")
    assert patches.rows["value"].to_pylist() == [1, 3, 4]
    patches.reject(
        pa.array([True, False, True]), "wrong", detail=pa.array(["first", "second", None]), file=patches.rows["id"]
    )
    assert patches.rows["value"].to_pylist() == [3]
    patches.reject(pa.array([False]), "none")
    rejected = patches.rejected()
    assert rejected.schema.equals(REJECTED_SCHEMA)
    assert rejected.to_pylist() == [
        {"id": "", "file": "one", "reason": "null counts as bad", "detail": ""},
        {"id": "a", "file": "a", "reason": "wrong", "detail": ""},
        {"id": "d", "file": "d", "reason": "wrong", "detail": "first"},
    ]


def test_a_reason_per_row() -> None:
    patches = CheckedRows(rows())
    patches.reject(pa.array([True, False, True, False]), pa.array(["long", "", "short", ""]), detail="same")
    assert [(row["id"], row["reason"], row["detail"]) for row in patches.rejected().to_pylist()] == [
        ("b", "short", "same"),
        ("d", "long", "same"),
    ]


def test_unusable_rows_stay_and_the_first_reason_counts() -> None:
    patches = CheckedRows(rows())
    patches.mark_unusable(pa.array([True, False, False, False]), "missing folder", detail="first")
    patches.mark_unusable(pa.array([True, False, True, False]), "no labels")
    assert patches.rows.equals(rows())
    assert patches.rejected().equals(REJECTED_SCHEMA.empty_table())
    assert [(row["id"], row["reason"], row["detail"]) for row in patches.unusable().to_pylist()] == [
        ("b", "no labels", ""),
        ("d", "missing folder", "first"),
    ]
