"""The metadata of BigEarthNet v1.0: lists of patches, one per split, and one JSON file with the labels per patch."""

import gzip
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import PathLike

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.archives.archive import BadRecordError
from pipelines.archives.checked_rows import CheckedRows
from pipelines.archives.files import join
from pipelines.archives.pixels.geotiff import read_file
from pipelines.machine.json_text import parse_json
from pipelines.storage.folder import Location
from pipelines.storage.locations import is_url

SPLIT_LISTS = {"train": "train", "validation": "val", "test": "test"}
"""File name, without suffix, of the list of each split."""
CLOUD_LIST = "patches_with_cloud_and_shadow"
SNOW_LIST = "patches_with_seasonal_snow"
NO_19_LIST = "patches_with_no_19_class_targets"

# Mission, level, sensing time (which may lack a zero), column and row; no tile. A name becomes a path.
_PATCH = r"\AS2[AB]_MSIL2A_[0-9]{8}T[0-9]{5,6}_[0-9]{1,2}_[0-9]{1,2}\z"
_TILE = re.compile(r"_T([0-9]{2}[A-Z]{3})_")
_LARGEST_JSON = 1 << 20  # bytes; real ones have about 1,200
# One thread parses about as fast as many; more threads wait for a slow or distant disk in parallel.
_THREADS = 8
_REMOTE_THREADS = 32
_FILES_PER_TASK = 512
_REMOTE_FILES_PER_TASK = 16


def read_splits(folder: str | PathLike[str]) -> CheckedRows:
    """Read the lists of the three splits.

    Returns:
        Rows with `id`, `split` and `file`, sorted by id. Malformed names are rejected. If a name is listed more than
        once, all but the first in the order train, validation, test are rejected.

    Raises:
        FileNotFoundError: A list is missing.
        ValueError: A list is damaged, or all are empty.
    """
    tables = []
    for split, name in SPLIT_LISTS.items():
        path = list_file(folder, name)
        if path is None:
            raise FileNotFoundError(f"{folder}: no {name}.csv or {name}.csv.gz, expected one patch name per line in it")
        ids = read_list(path)
        tables.append(pa.table({"id": ids, "split": pa.repeat(split, len(ids)), "file": pa.repeat(path, len(ids))}))
    table = pa.concat_tables(tables)
    if table.num_rows == 0:
        raise ValueError(f"{folder}: the lists of the splits are empty, expected one patch name per line")
    patches = CheckedRows(table.take(pc.sort_indices(table["id"])).combine_chunks())  # the sort is stable
    patches.reject(pc.invert(pc.match_substring_regex(patches.rows["id"], _PATCH)), "malformed id")
    patches.reject_repeated_ids()
    return patches


def list_file(folder: str | PathLike[str], name: str) -> str | None:
    """Return the path of a list, published as `<name>.csv` or compressed; None if it is missing."""
    candidates = (join(folder, f"{name}.csv"), join(folder, f"{name}.csv.gz"))
    return next((path for path in candidates if Location(path).is_file()), None)


def read_list(path: str | PathLike[str]) -> pa.Array:
    """Return the lines of a list that are not empty; most published lists have Windows line ends.

    Raises:
        ValueError: The file is not text, or is an incomplete gzip file.
    """
    try:
        data = Location(str(path)).read()
        text = (gzip.decompress(data) if str(path).endswith(".gz") else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a list of patches, download it again ({error})") from error
    return pa.array([line.strip() for line in text.split("\n") if line.strip()], pa.string())


def read_labels(
    paths: Sequence[str], indices: Mapping[str, int | None]
) -> tuple[pa.ListArray, pa.StringArray, list[BadRecordError | None]]:
    """Read the labels and tiles of many patches.

    Args:
        paths: Paths of the JSON files.
        indices: Class index of every known label, None for one without.

    Returns:
        Per file the class indices, ascending and unique, int16; the tile of the Sentinel-2 grid, or null; and its
        error, if any. A bad file has no indices and no tile.
    """
    local = not paths or not is_url(paths[0])
    at_once = _FILES_PER_TASK if local else _REMOTE_FILES_PER_TASK
    with ThreadPoolExecutor(_THREADS if local else _REMOTE_THREADS) as pool:
        tasks = [paths[start : start + at_once] for start in range(0, len(paths), at_once)]
        results = list(pool.map(partial(_read_some, indices=indices), tasks))
    labels = pa.concat_arrays([pa.array([], pa.list_(pa.int16())), *(result[0] for result in results)])
    tiles = pa.concat_arrays([pa.array([], pa.string()), *(result[1] for result in results)])
    return labels, tiles, list(itertools.chain.from_iterable(result[2] for result in results))


def _read_some(
    paths: Sequence[str], indices: Mapping[str, int | None]
) -> tuple[pa.ListArray, pa.StringArray, list[BadRecordError | None]]:
    labels, tiles, errors = zip(*(_read_one(path, indices) for path in paths), strict=True)
    return pa.array(labels, pa.list_(pa.int16())), pa.array(tiles, pa.string()), list(errors)


def _read_one(path: str, indices: Mapping[str, int | None]) -> tuple[list[int], str | None, BadRecordError | None]:
    try:
        return *_labels_and_tile(path, indices), None
    except BadRecordError as error:
        return [], None, error


def _labels_and_tile(path: str, indices: Mapping[str, int | None]) -> tuple[list[int], str | None]:
    content = read_file(path, _LARGEST_JSON)
    try:
        values = parse_json(content)
    except ValueError as error:
        raise BadRecordError(path, "malformed JSON", str(error)) from error
    names = values.get("labels") if isinstance(values, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadRecordError(path, "malformed labels", "expected a list of class names under the key labels")
    unknown = next((name for name in names if name not in indices), None)
    if unknown is not None:
        raise BadRecordError(path, "unknown label", unknown)
    found = {index for index in map(indices.__getitem__, names) if index is not None}
    if not found:
        raise BadRecordError(path, "no labels", f"of those that count: {', '.join(names)}" if names else "")
    tile = _TILE.search(str(values.get("tile_source")))
    return sorted(found), tile and tile[1]
