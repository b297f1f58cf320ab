"""The user's own columns of a table: its key, and those that also travel to the dataset and the predictions."""

import textwrap
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.types as types

from conf.sections.section import refuse
from pipelines.archives.archive import RESERVED_NAMES

_TRAVELS_AS = {
    **{kind: kind for kind in (pa.string(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.bool_(), pa.date32())},
    **{kind: kind for kind in (pa.float32(), pa.float64())},
    **{pa.large_string(): pa.string(), pa.date64(): pa.date32()},
    **{pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64()},
    **{pa.timestamp(unit): pa.timestamp("us") for unit in ("s", "ms", "us", "ns")},
}
"""Types for the values of a column that Spark and Delta have too."""


def travelling(key: str | None, keep: Sequence[str]) -> list[str]:
    """Return the columns that travel under their own name: the key, unless that name is the samples' `id`, and `keep`.

    Args:
        key: Name of the column `archive.id`.
        keep: Names of the columns `archive.keep`.
    """
    return [name for name in dict.fromkeys([key, *keep]) if name and not (name == key and name.lower() == "id")]


def kept_schema(where: str, schema: pa.Schema, key: str | None, keep: Sequence[str], group: str) -> pa.Schema:
    """Return the key and the columns to keep, with the types with which they travel.

    Args:
        where: Name of what has the columns, for messages.
        schema: All columns.
        key: Name of the column `archive.id`.
        keep: Names of the columns `archive.keep`.
        group: Name of the image group.

    Raises:
        ValueError: A type cannot travel, or a name is taken; Spark does not distinguish upper and lower case.
    """
    taken, fields = {*RESERVED_NAMES, group}, list[pa.Field]()
    for name in filter(None, dict.fromkeys([key, *keep])):
        kind, is_key = _travels_as(schema.field(name).type), name == key
        what = f"{where}: column {name!r} (archive.{'id' if is_key else 'keep'})"
        further = "" if is_key else ", floating-point numbers, booleans, dates or timestamps"
        refuse(
            (
                name in travelling(key, keep) and name.lower() in taken,
                f"{what} has a name that datasets or predictions use already: rename it",
            ),
            (
                kind is None or (is_key and not (types.is_string(kind) or types.is_integer(kind))),
                f"{what} is {schema.field(name).type}, expected texts or integers below 2**63{further}",
            ),
        )
        taken.add(name.lower())
        fields.append(pa.field(name, kind))
    return pa.schema(fields)


def _travels_as(column: pa.DataType) -> pa.DataType | None:
    """Return the type with which a column travels; None if it cannot."""
    kind = column.value_type if types.is_dictionary(column) else column
    return pa.timestamp("us", "UTC") if types.is_timestamp(kind) and kind.tz else _TRAVELS_AS.get(kind)


def refuse_repeated(where: str, column: str, repeated: Sequence[tuple[object, int]]) -> None:
    """Refuse a column of keys, if some are null or in several rows.

    Args:
        where: Name of what has the column.
        column: Column of the keys.
        repeated: The null or repeated keys, each with its number of rows; the message names the first.

    Raises:
        ValueError: There are such keys.
    """
    for value, rows in repeated:
        found = "no value" if value is None else textwrap.shorten(repr(value), 80)
        raise ValueError(
            f"{where}: column {column!r} (archive.id) has {found} in {rows:,} rows, expected another value in each row"
        )
