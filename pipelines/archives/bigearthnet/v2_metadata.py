"""The metadata files of BigEarthNet v2.0: one row per patch with its id, labels, split and Sentinel-1 counterpart."""

from collections.abc import Sequence
from os import PathLike

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.archives.archive import INDEX_SCHEMA
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.checked_rows import CheckedRows
from pipelines.sample import SPLITS
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

# Mission, level, sensing time, processing baseline, relative orbit, MGRS tile, column and row in the tile.
# Names become paths, so no separator, dot or line end may pass.
_PATCH_ID = r"\AS2[AB]_MSIL2A_[0-9]{8}T[0-9]{6}_N[0-9]{4}_R[0-9]{3}_T[0-9]{2}[A-Z]{3}_[0-9]{2}_[0-9]{2}\z"
# Mission, mode, product, polarisations, sensing time, MGRS tile, column and row; these two are not padded.
_S1_NAME = r"\AS1[AB]_IW_GRDH_1SDV_[0-9]{8}T[0-9]{6}_[0-9]{2}[A-Z]{3}_[0-9]{1,2}_[0-9]{1,2}\z"
_COLUMNS = {"patch_id": pa.string(), "labels": pa.list_(pa.string()), "split": pa.string()}
METADATA = "metadata.parquet"
FLAG_COLUMNS = ("contains_seasonal_snow", "contains_cloud_or_shadow")
_OPTIONAL_COLUMNS = {"country": pa.string(), **dict.fromkeys(FLAG_COLUMNS, pa.bool_())}


def read_metadata(files: Sequence[str | PathLike[str]], *, sentinel1: bool = False) -> CheckedRows:
    """Read metadata files, without looking at the patches on disk.

    Args:
        files: Paths of the metadata files. If an id is repeated, its first row counts.
        sentinel1: Whether the caller needs the patches of Sentinel-1.

    Returns:
        Rows with `id`, `labels` (names), `split`, with `sentinel1` `s1_name`, `country`, the two columns of flags and
        `file`, sorted by id. Rejected are malformed and repeated ids, unknown splits, unknown labels, patches without
        labels, malformed `s1_name`. Country and flags are null where a file lacks their columns.

    Raises:
        ValueError: A file is no Parquet file, lacks a column or has no rows.
    """
    columns = pa.schema(_COLUMNS | ({"s1_name": pa.string()} if sentinel1 else {}))
    table = pa.concat_tables([_read_columns(path, columns) for path in files])
    table = table.rename_columns(["id", *table.column_names[1:]])
    patches = CheckedRows(table.take(pc.sort_indices(table["id"])).combine_chunks())  # the sort is stable
    _reject_unmatched(patches, "id", _PATCH_ID, "malformed id")
    patches.reject_repeated_ids()
    splits = patches.rows["split"]
    patches.reject(pc.invert(pc.is_in(splits, pa.array(SPLITS))), "unknown split", detail=splits)
    _reject_labels(patches)
    if sentinel1:
        _reject_unmatched(patches, "s1_name", _S1_NAME, "malformed s1_name")
    return patches


def _read_columns(path: str | PathLike[str], columns: pa.Schema) -> pa.Table:
    try:
        source = pa.BufferReader(Location(str(path)).read()) if is_url(str(path)) else path
        there = pq.read_schema(source).names
        missing = [name for name in columns.names if name not in there]
        if missing:
            raise ValueError(f"{path}: column {', '.join(missing)} is missing, take the file of BigEarthNet v2.0")
        schema = pa.schema([*columns, *pa.schema(_OPTIONAL_COLUMNS)])
        table = pq.read_table(source, columns=[name for name in schema.names if name in there])
        read = [table[each.name] if each.name in there else pa.nulls(len(table), each.type) for each in schema]
        table = pa.table(read, names=schema.names).cast(schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not BigEarthNet v2.0 metadata, download it again ({error})") from error
    if table.num_rows == 0:
        raise ValueError(f"{path}: has no rows, expected one per patch")
    file = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int32), [str(path)])
    return table.append_column("file", file)


def _reject_unmatched(patches: CheckedRows, column: str, pattern: str, reason: str) -> None:
    values = patches.rows[column]
    patches.reject(pc.invert(pc.match_substring_regex(values, pattern)), reason, detail=values)


def _reject_labels(patches: CheckedRows) -> None:
    lengths = pc.fill_null(pc.list_value_length(patches.rows["labels"]), 0)
    patches.reject(pc.equal(lengths, 0), "no labels")
    labels = patches.rows["labels"].combine_chunks()
    names = labels.flatten()
    unknown = pc.is_null(pc.index_in(names, pa.array(BIGEARTHNET_19))).to_numpy(zero_copy_only=False)
    rows, first = np.unique(_row_of_label(labels)[unknown], return_index=True)
    first_unknown = np.full(len(labels), -1)
    first_unknown[rows] = np.flatnonzero(unknown)[first]
    bad = first_unknown >= 0
    patches.reject(pa.array(bad), "unknown label", detail=names.take(pa.array(first_unknown, mask=~bad)))


def class_indices(labels: pa.ListArray) -> pa.ListArray:
    """Convert class names of every patch, all known, to indices into `BIGEARTHNET_19`, ascending and unique."""
    indices = pc.index_in(labels.flatten(), pa.array(BIGEARTHNET_19)).to_numpy()
    # One number per (patch, class): sorted and unique in one pass over 1.4 million labels.
    pairs = np.unique(_row_of_label(labels) * len(BIGEARTHNET_19) + indices)
    per_patch = np.bincount(pairs // len(BIGEARTHNET_19), minlength=len(labels))
    offsets = np.concatenate([[0], np.cumsum(per_patch)]).astype(np.int32)
    values = pa.array((pairs % len(BIGEARTHNET_19)).astype(np.int16))
    return pa.ListArray.from_arrays(offsets, values, type=INDEX_SCHEMA.field("labels").type)


def _row_of_label(labels: pa.ListArray) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.repeat(np.arange(len(labels)), pc.list_value_length(labels))
