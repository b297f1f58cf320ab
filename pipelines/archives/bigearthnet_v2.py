"""BigEarthNet v2.0 (reBEN) as its authors publish it: Sentinel-2 patches of 1,200 m, 12 bands, 19 classes.

```
<root>/metadata.parquet
<root>/BigEarthNet-S2/<tile>/<patch>/<patch>_B01.tif ... <patch>_B12.tif
```

A tile's name is the patch's without its last two fields. Pixels are uint16, reflectance x 10,000.
The patches with snow, clouds or shadows have their own metadata file and are not part of the archive.

Source: Clasen et al., "reBEN: Refined BigEarthNet Dataset for Remote Sensing Image Analysis", 2024.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.archives.archive import INDEX_SCHEMA, ArchiveDescription
from pipelines.archives.geotiff import read_band
from pipelines.archives.nomenclature import BIGEARTHNET_19
from pipelines.dataset.schema import ImageGroup

KIND = "bigearthnet_v2"
METADATA = "metadata.parquet"
IMAGES = "BigEarthNet-S2"
SPLITS = ("train", "validation", "test")
GROUPS = (
    ImageGroup("bands_10m", (120, 120, 4), "uint16", ("B02", "B03", "B04", "B08")),
    ImageGroup("bands_20m", (60, 60, 6), "uint16", ("B05", "B06", "B07", "B8A", "B11", "B12")),
    ImageGroup("bands_60m", (20, 20, 2), "uint16", ("B01", "B09")),
)

_LAYOUT = f"expected {METADATA} and {IMAGES}/<tile>/<patch>/<patch>_B01.tif in it"
# Mission, level, sensing time, processing baseline, relative orbit, MGRS tile, column and row in the tile.
# An id becomes a path, so nothing else may pass: no separator, no dots, no line end.
_PATCH_ID = r"\AS2[AB]_MSIL2A_[0-9]{8}T[0-9]{6}_N[0-9]{4}_R[0-9]{3}_T[0-9]{2}[A-Z]{3}_[0-9]{2}_[0-9]{2}\z"
_COLUMN_AND_ROW = len("_00_00")
_COLUMNS = pa.schema([("patch_id", pa.string()), ("labels", pa.list_(pa.string())), ("split", pa.string())])


@dataclass(frozen=True)
class BigEarthNetV2:
    """An extracted BigEarthNet v2.0 archive, Sentinel-2 part."""

    root: str
    """Folder that holds `metadata.parquet` and `BigEarthNet-S2`."""

    @property
    def description(self) -> ArchiveDescription:
        """The 19 classes, several per patch, and the bands in three groups by resolution."""
        return ArchiveDescription(KIND, "multi_label", BIGEARTHNET_19, GROUPS)

    def index(self) -> pa.Table:
        """List every patch of `metadata.parquet`, sorted by id, as a table of `INDEX_SCHEMA`.

        Raises:
            FileNotFoundError: The archive or its metadata is missing.
            ValueError: The metadata is malformed or empty, or names patches that are not there.
        """
        table = read_metadata(self._metadata())
        check_folders(Path(self.root), pc.list_flatten(table["paths"]))
        return table

    def fingerprint(self) -> str:
        """SHA-256 hex digest of the kind and the bytes of `metadata.parquet`."""
        digest = hashlib.sha256(KIND.encode())
        digest.update(self._metadata().read_bytes())
        return digest.hexdigest()

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        """Read the 12 bands of one patch: uint16 `(120, 120, 4)`, `(60, 60, 6)` and `(20, 20, 2)`.

        Raises:
            BadRecordError: A band file is missing, truncated, of the wrong size or dtype.
        """
        folder = Path(self.root, paths[0])
        for group in GROUPS:
            _read_group(folder, group, out[group.name])

    def _metadata(self) -> Path:
        path = Path(self.root, METADATA)
        if not path.is_file():
            raise FileNotFoundError(f"{self.root}: no BigEarthNet v2.0 archive, {_LAYOUT}")
        return path


def _read_group(folder: Path, group: ImageGroup, out: NDArray[Any]) -> None:
    for position, band in enumerate(group.bands):
        path = folder / f"{folder.name}_{band}.tif"
        if not path.exists():
            copied = path.with_suffix(".tiff")  # the suffix in some redistributed copies
            path = copied if copied.exists() else path
        out[..., position] = read_band(path, group.shape[:2], group.dtype)


def read_metadata(path: Path) -> pa.Table:
    """Read and check the metadata file: a table of `INDEX_SCHEMA` sorted by patch id, whatever is on disk beside it.

    Raises:
        ValueError: It is no Parquet file, lacks a column, is empty, or has a malformed or repeated patch id,
            an unknown split, an unknown label or a patch without labels.
    """
    table = _read_columns(path)
    table = table.take(pc.sort_indices(table["patch_id"])).combine_chunks()
    ids, labels, splits = (table[name].chunk(0) for name in _COLUMNS.names)
    _reject(path, pc.invert(pc.match_substring_regex(ids, _PATCH_ID)), ids, "a malformed patch_id", "a v2.0 name")
    _reject(path, pc.equal(ids[1:], ids[:-1]), ids[1:], "a repeated patch_id", "each once")
    known = pc.is_in(splits, value_set=pa.array(SPLITS))
    _reject(path, pc.invert(known), splits, "an unknown split", ", ".join(SPLITS))
    without = pc.equal(pc.fill_null(pc.list_value_length(labels), 0), 0)
    _reject(path, without, ids, "no labels", "at least one")
    tiles = pc.utf8_slice_codeunits(ids, 0, -_COLUMN_AND_ROW)
    folders = pc.binary_join_element_wise(IMAGES, tiles, ids, "/")
    paths = pa.ListArray.from_arrays(
        np.arange(len(ids) + 1, dtype=np.int32), folders, type=INDEX_SCHEMA.field("paths").type
    )
    return pa.table([ids, splits, _class_indices(path, labels), paths], schema=INDEX_SCHEMA)


def _read_columns(path: Path) -> pa.Table:
    try:
        missing = [name for name in _COLUMNS.names if name not in pq.read_schema(path).names]
        if missing:
            raise ValueError(f"{path}: column {', '.join(missing)} is missing, take the file of BigEarthNet v2.0")
        table = pq.read_table(path, columns=_COLUMNS.names).select(_COLUMNS.names).cast(_COLUMNS)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not BigEarthNet v2.0 metadata, download it again ({error})") from error
    if table.num_rows == 0:
        raise ValueError(f"{path}: has no rows, expected one per patch")
    return table


def _reject(path: Path, wrong: pa.Array, values: pa.Array, what: str, expected: str) -> None:
    """Raise ValueError where any of `wrong` (null counts) is true, with the first of `values` where it is."""
    found = values.filter(pc.fill_null(wrong, True))
    if len(found):
        raise ValueError(f"{path}: {len(found)} rows have {what}, the first {found[0].as_py()!r}, expected {expected}")


def _class_indices(path: Path, labels: pa.ListArray) -> pa.ListArray:
    """Class names of every patch -> indices into `BIGEARTHNET_19`, ascending and each once."""
    names = labels.flatten()
    indices = pc.index_in(names, value_set=pa.array(BIGEARTHNET_19))
    _reject(path, pc.is_null(indices), names, "an unknown label", "the 19 classes of BigEarthNet")
    rows = np.repeat(np.arange(len(labels)), pc.list_value_length(labels))
    # One number per (patch, class): sorted and unique in one pass over 1.4 million labels.
    pairs = np.unique(rows * len(BIGEARTHNET_19) + indices.to_numpy())
    per_patch = np.bincount(pairs // len(BIGEARTHNET_19), minlength=len(labels))
    offsets = np.concatenate([[0], np.cumsum(per_patch)]).astype(np.int32)
    values = pa.array((pairs % len(BIGEARTHNET_19)).astype(np.int16))
    return pa.ListArray.from_arrays(offsets, values, type=INDEX_SCHEMA.field("labels").type)


def check_folders(root: Path, paths: pa.ChunkedArray) -> None:
    """Check that every patch folder exists, with one listing per tile instead of one look-up per patch.

    Args:
        root: The archive.
        paths: Patch folders relative to it, `BigEarthNet-S2/<tile>/<patch>`.

    Raises:
        FileNotFoundError: There is no folder `BigEarthNet-S2`.
        ValueError: Patches are missing.
    """
    if not (root / IMAGES).is_dir():
        raise FileNotFoundError(f"{root}: no folder {IMAGES}, {_LAYOUT}")
    tiles = pc.unique(pc.list_element(pc.split_pattern(paths, "/"), 1)).to_pylist()
    present = [f"{IMAGES}/{tile}/{patch}" for tile in tiles for patch in _folders_in(root / IMAGES / tile)]
    missing = paths.filter(pc.invert(pc.is_in(paths, value_set=pa.array(present, pa.string()))))
    if len(missing):
        raise ValueError(
            f"{METADATA} names {len(missing)} patches that are not under {root / IMAGES}, the first is "
            f"{missing[0].as_py()}; extract the whole archive, or remove their rows"
        )


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return []
