"""Names, types and values of the plain columns of a dataset."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import Georeference, kept_fields

ID_FIELD = "id"
LABEL_FIELD = "labels"
CHECKSUM_FIELD = "crc32c"

METADATA_SCHEMA = pa.schema(
    [
        pa.field("label_names", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("country", pa.string()),
        pa.field("season", pa.string()),
        pa.field("tile", pa.string()),
        pa.field("acquisition_date", pa.date32()),
        pa.field("flags", pa.list_(pa.field("item", pa.string(), nullable=False))),
        pa.field("epsg", pa.int32()),
        pa.field("x0", pa.float64()),
        pa.field("y0", pa.float64()),
    ]
)
"""Columns of metadata about a sample; null where the archive does not know a value.

They are for queries (Spark, DuckDB, Polars), not for training. `season` is meteorological, on the northern hemisphere.
`flags` holds `snow` and `cloud_or_shadow`. `x0` and `y0` are the upper left corner in the coordinate reference system
with the code `epsg`. Petastorm's schema leaves them out: two are lists of text, and its TensorFlow adapter refuses
nulls.
"""


def metadata_columns(
    samples: pa.Table, class_names: Sequence[str], georeferences: Sequence[Georeference | None]
) -> list[pa.Array]:
    """Build the columns of `METADATA_SCHEMA`, in its order, and the user's own after them.

    Args:
        samples: Rows of the archive's index (`ArchiveIndex.samples`).
        class_names: Name of every class index.
        georeferences: Location of each row's image, from its files.
    """
    labels = samples["labels"].combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(labels).to_numpy(zero_copy_only=False))])
    names = pa.array(class_names, pa.string()).take(pc.list_flatten(labels))
    found = {
        "label_names": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), names),
        "epsg": pa.array([place and place.epsg for place in georeferences], pa.int32()),
        "x0": pa.array([place and place.x0 for place in georeferences], pa.float64()),
        "y0": pa.array([place and place.y0 for place in georeferences], pa.float64()),
    }
    columns = {name: samples[name].combine_chunks() for name in METADATA_SCHEMA.names if name not in found} | found
    kept = [samples[field.name].combine_chunks() for field in kept_fields(samples.schema)]
    return [*(columns[field.name].cast(field.type) for field in METADATA_SCHEMA), *kept]


def plain_values(table: pa.Table, arrays: Collection[str]) -> bytes:
    """Return the values of the plain columns of a row group as bytes, from which a shard's digest is computed.

    Columns follow each other in file order. Each is its name, a line feed, a byte per row that is 0 where the value is
    missing, and the values. Numbers are little-endian, dates are 32-bit days since 1970, missing ones are 0. Texts and
    lists are the 32-bit lengths of all rows, followed by the UTF-8 bytes or by the items as another column. The user's
    own columns may also have timestamps, which are 64-bit numbers of their unit, and booleans, which are bytes.

    Args:
        table: All rows of a row group. Wider types, as other programs write them, give the same bytes.
        arrays: Columns to leave out, because the column `crc32c` covers their values.

    Raises:
        ValueError: A value does not fit the type that the column has in our own files.
    """
    types = {CHECKSUM_FIELD: pa.uint32(), **{field.name: field.type for field in METADATA_SCHEMA}}
    parts = []
    for name in table.column_names:
        if name not in arrays:
            values = pa.concat_arrays(table[name].chunks) if table[name].num_chunks else pa.array([], pa.null())
            parts += [f"{name}\n".encode(), *_plain_bytes(values, types.get(name, values.type))]
    return b"".join(parts)


def _plain_bytes(values: pa.Array, data_type: pa.DataType) -> Iterator[bytes]:
    yield values.is_valid().to_numpy(zero_copy_only=False).tobytes()
    if pa.types.is_nested(data_type):
        yield pc.fill_null(pc.list_value_length(values), 0).cast(pa.int32()).to_numpy().tobytes()
        yield from _plain_bytes(pc.list_flatten(values), pa.string())
    elif pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        texts = pc.fill_null(values.cast(pa.string()), "")
        yield pc.binary_length(texts).to_numpy().tobytes()
        offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
        if len(texts) and offsets[-1] > offsets[0]:
            yield memoryview(texts.buffers()[2])[offsets[0] : offsets[-1]].tobytes()
    else:
        as_numbers = {pa.date32(): pa.int32(), pa.date64(): pa.int32(), pa.bool_(): pa.uint8()}
        numbers = values.cast(pa.int64() if pa.types.is_timestamp(data_type) else as_numbers.get(data_type, data_type))
        yield pc.fill_null(numbers, 0).to_numpy().tobytes()
