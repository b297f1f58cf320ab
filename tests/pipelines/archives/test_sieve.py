import pyarrow as pa

from pipelines.archives.archive import REJECTED_SCHEMA
from pipelines.archives.sieve import Sieve


def rows() -> pa.Table:
    return pa.table({"id": ["d", None, "b", "a"], "file": ["one", "one", "two", "two"], "value": [1, 2, 3, 4]})


def test_rows_leave_once_with_a_reason() -> None:
    sieve = Sieve(rows())
    sieve.reject(pa.array([False, None, False, False]), "null counts as bad")
    assert sieve.rows["value"].to_pylist() == [1, 3, 4]
    sieve.reject(
        pa.array([True, False, True]), "wrong", detail=pa.array(["first", "second", None]), file=sieve.rows["id"]
    )
    assert sieve.rows["value"].to_pylist() == [3]
    sieve.reject(pa.array([False]), "none")
    rejected = sieve.rejected()
    assert rejected.schema.equals(REJECTED_SCHEMA)
    assert rejected.to_pylist() == [
        {"id": "", "file": "one", "reason": "null counts as bad", "detail": ""},
        {"id": "a", "file": "a", "reason": "wrong", "detail": ""},
        {"id": "d", "file": "d", "reason": "wrong", "detail": "first"},
    ]


def test_a_reason_per_row() -> None:
    sieve = Sieve(rows())
    sieve.reject(pa.array([True, False, True, False]), pa.array(["long", "", "short", ""]), detail="same")
    assert [(row["id"], row["reason"], row["detail"]) for row in sieve.rejected().to_pylist()] == [
        ("b", "short", "same"),
        ("d", "long", "same"),
    ]


def test_unusable_rows_stay_and_the_first_reason_counts() -> None:
    sieve = Sieve(rows())
    sieve.mark_unusable(pa.array([True, False, False, False]), "missing folder", detail="first")
    sieve.mark_unusable(pa.array([True, False, True, False]), "no labels")
    assert sieve.rows.equals(rows())
    assert sieve.rejected().equals(REJECTED_SCHEMA.empty_table())
    assert [(row["id"], row["reason"], row["detail"]) for row in sieve.unusable().to_pylist()] == [
        ("b", "no labels", ""),
        ("d", "missing folder", "first"),
    ]


def test_nothing_rejected() -> None:
    sieve = Sieve(rows())
    assert sieve.rejected().equals(REJECTED_SCHEMA.empty_table())
    assert sieve.rows.equals(rows())
