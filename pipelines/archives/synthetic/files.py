"""A BigEarthNet v2.0 archive of synthetic patches, in the layout and the file format of the real one.

It serves first runs without the 60 GB download, tests and demonstrations: its scores say nothing about real data.
"""

import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import rasterio
from numpy.typing import NDArray
from rasterio.crs import CRS

from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.v2 import GROUPS, IMAGES, METADATA
from pipelines.archives.synthetic.landscape import draw_patches, render
from pipelines.archives.synthetic.scenes import PATCH_METRES, Patch, check_counts, patch

METADATA_SCHEMA = pa.schema(
    [
        ("patch_id", pa.string()),
        ("labels", pa.list_(pa.field("element", pa.string()))),
        ("split", pa.string()),
        ("country", pa.string()),
        ("s1_name", pa.string()),
        ("s2v1_name", pa.string()),
        ("contains_seasonal_snow", pa.bool_()),
        ("contains_cloud_or_shadow", pa.bool_()),
    ]
)
"""Columns of the archive's `metadata.parquet`, as published."""

_RECIPE = b"groundswell.synthetic"  # key in the metadata of metadata.parquet
_PATCHES_PER_TASK = 8


def generate_bigearthnet_v2(
    root: Path,
    *,
    train: int,
    validation: int,
    test: int,
    seed: int = 0,
    processes: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Generate an archive that `BigEarthNetV2` opens; do nothing if `root` is already exactly this archive.

    A patch is a pure function of the seed and its number, for any number of processes. The archive gets its name only
    when it is complete. Worker processes are spawned, because the threads of Spark or TensorFlow do not survive a
    fork. So a script calls this below `if __name__ == "__main__":`.

    Args:
        root: Folder to make; it may exist if it is empty.
        train: Number of patches in the training split.
        validation: Number of patches in the validation split.
        test: Number of patches in the test split.
        seed: Seed of everything random, 0 or more.
        processes: Number of worker processes, by default one per core. With 1, this process does everything.
        progress: Called with 1 for each finished patch, e.g. `tqdm.update`.

    Raises:
        ValueError: A number is out of range, or `root` holds something else.
    """
    counts = {"train": train, "validation": validation, "test": test}
    check_counts(counts)
    recipe = json.dumps({"format": 1, "seed": seed, **counts}).encode()
    if _holds(root, recipe):
        return
    if root.exists() and not (root.is_dir() and next(root.iterdir(), None) is None):
        raise ValueError(f"{root}: exists and is not the archive with {counts}, seed {seed}; choose a new folder")
    partial = root.with_name(f".{root.name}.{uuid.uuid4().hex}.partial")
    try:
        (partial / IMAGES).mkdir(parents=True)
        labels = []
        write = functools.partial(_write_patch, partial, seed)
        processes = processes or os.cpu_count() or 1
        for patch_labels in draw_patches(write, sum(counts.values()), processes, _PATCHES_PER_TASK):
            labels.append(patch_labels)
            if progress:
                progress(1)
        _write_metadata(partial / METADATA, recipe, counts, labels)
        partial.rename(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _holds(root: Path, recipe: bytes) -> bool:
    """Return whether the same call completed `root`: `metadata.parquet` is written last and contains the recipe."""
    try:
        return (pq.read_schema(root / METADATA).metadata or {}).get(_RECIPE) == recipe
    except (pa.ArrowException, OSError):
        return False


def _write_patch(root: Path, seed: int, number: int) -> tuple[int, ...]:
    place = patch(number)
    folder = root / IMAGES / place.scene.name / place.id
    folder.mkdir(parents=True)
    # Without EMPTY_DIR GDAL lists the folder at every file.
    with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR"):
        images, labels = render(seed, number, GROUPS)
        for group in GROUPS:
            for position, band in enumerate(group.bands):
                _write_band(folder / f"{place.id}_{band}.tif", images[group.name][..., position], place)
    return labels


def _write_band(path: Path, pixels: NDArray[np.uint16], place: Patch) -> None:
    """Write one band in the format of the real files: GDAL's default strips, uncompressed, 0 for a missing pixel."""
    height, width = pixels.shape
    metres = PATCH_METRES / height
    profile = {
        "driver": "GTiff",
        "height": height,
        "width": width,
        "count": 1,
        "dtype": "uint16",
        "nodata": 0,
        "crs": _utm(place.scene.epsg),
        "transform": rasterio.Affine(metres, 0, place.west, 0, -metres, place.north),
    }
    with rasterio.open(path, "w", **profile) as file:
        file.write(pixels, 1)


_utm = functools.cache(CRS.from_epsg)


def _write_metadata(path: Path, recipe: bytes, counts: dict[str, int], labels: list[tuple[int, ...]]) -> None:
    splits = np.repeat(list(counts), list(counts.values())).tolist()
    rows = [
        {
            "patch_id": place.id,
            "labels": [BIGEARTHNET_19[label] for label in patch_labels],
            "split": split,
            "country": place.scene.country,
            "s1_name": place.s1_name,
            "s2v1_name": place.s2v1_name,
            "contains_seasonal_snow": False,
            "contains_cloud_or_shadow": False,
        }
        for place, patch_labels, split in zip(map(patch, range(len(labels))), labels, splits, strict=True)
    ]
    rows.sort(key=lambda row: str(row["patch_id"]))
    pq.write_table(pa.Table.from_pylist(rows, METADATA_SCHEMA.with_metadata({_RECIPE: recipe})), path)
