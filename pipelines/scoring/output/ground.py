"""Predictions as a map: as GeoJSON, as GeoTIFF, and as a picture with a legend."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import rasterio
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray
from rasterio.errors import NotGeoreferencedWarning, RasterioError

from pipelines.dataset.format.files import relation
from pipelines.dataset.report.tables import shorten
from pipelines.machine.json_text import parse_json
from pipelines.sample import ImageGroup
from pipelines.scoring.output.ground_geometry import GroundPredictions, cell_of, patch_metres, raster_of, rings_of
from pipelines.scoring.output.output import FILE_NAME
from pipelines.storage.folder import Location
from pipelines.storage.locations import inside

SUFFIXES = (".geojson", ".tif")
_NOTHING = 255
_INCHES, _LONGEST_NAME = 10.0, 44
_CELLS_OF_A_PICTURE = 1500
"""Cells along the longer side of a picture."""
_LEAST_AREA = 9.0
"""Area of the square below each patch, in square points: a patch itself could be smaller than a dot."""
_FEATURES_AT_ONCE = 10_000
_COLUMNS = ("id", "tile", "epsg", "x0", "y0", "probabilities", "labels", "model_version")
_SHOWN_TILES = 5
_MARK = "Groundswell"
"""Maker in every file of a map. Only files with this mark are replaced."""
_START = f'{{"type": "FeatureCollection", "made_by": "{_MARK}", "features": ['
_SYSTEMS_OF_SENTINEL_2 = (*range(32601, 32661), *range(32701, 32761))  # EPSG codes of UTM's zones


def check_map_file(path: str) -> Path:
    """Check the name of a map before anything is scored.

    Raises:
        ValueError: The suffix is not in `SUFFIXES`, or the folder does not exist.
    """
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--map {path} should end in {' or '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ValueError(f"--map {path}: there is no folder {str(file.parent)!r}")
    return file


def check_map(file: Path, folders: Mapping[str, Location]) -> None:
    """Check the location of a map before anything is scored.

    Args:
        file: Path of the map.
        folders: Folders that must contain only their own files, by the argument that names each.

    Raises:
        ValueError: The map is in one of the folders, or would replace a file that is no map of ours.
    """
    for argument, folder in folders.items():
        found = relation(Location(str(file.absolute())), folder)
        if found in ("is", "is in"):
            raise ValueError(f"--map {file} {found} {argument} {folder}: choose a file outside of that folder")
    is_geotiff = file.suffix.lower() == ".tif"
    _refuse_foreign(
        [file, *(_of_system(file, code) for code in _SYSTEMS_OF_SENTINEL_2 if is_geotiff), _picture_of(file)], file
    )


def _refuse_foreign(files: Iterable[Path], map_file: Path) -> None:
    """Make sure that a map would only replace files that are empty or of an earlier map."""
    for file in files:
        if file.exists() and not _is_ours(file):
            raise ValueError(
                f"--map {map_file} would replace {file}, which is no map of groundswell: move or remove {file.name}, "
                "or choose another file"
            )


def _is_ours(file: Path) -> bool:
    if not file.is_file():
        return False
    if not file.stat().st_size:
        return True
    if file.suffix.lower() == ".geojson":
        with file.open("rb") as stream:
            return stream.read(len(_START)) == _START.encode()
    with warnings.catch_warnings(action="ignore", category=NotGeoreferencedWarning):
        try:
            with rasterio.open(file, driver="PNG" if file == _picture_of(file) else "GTiff") as raster:
                tags = raster.tags()
        except RasterioError:
            return False
    return _MARK in (tags.get("TIFFTAG_SOFTWARE"), tags.get("Software"))


def _of_system(file: Path, code: int) -> Path:
    return file.with_stem(f"{file.stem}-{code}")


def _picture_of(file: Path) -> Path:
    return file.with_suffix(".png")


def read_ground(output: Location, groups: Sequence[ImageGroup], tile: str | None = None) -> GroundPredictions:
    """Read finished predictions that have a location.

    Args:
        output: Folder of the predictions.
        groups: Image groups of the scored samples.
        tile: Name of the only tile to read; None: all.

    Raises:
        ValueError: The size of a patch is unknown, or no prediction has a location, or none is in the tile.
    """
    metres = patch_metres(groups)
    manifest = parse_json(output.read(FILE_NAME))
    names = tuple(manifest["class_names"])
    tables, tiles, rows, unplaced = [], set(), 0, 0
    for part in manifest["parts"]:
        with output.open(inside(part["file"], output)) as file:
            table = pq.read_table(file, columns=list(_COLUMNS))
        if tile is not None:
            tiles |= set(pc.unique(table["tile"]).to_pylist())
            table = table.filter(pc.equal(table["tile"], tile))
        placed = table.filter(pc.is_valid(table["epsg"]))
        tables.append(placed)
        rows, unplaced = rows + len(table), unplaced + len(table) - len(placed)
    if tile is not None and not rows:
        known = sorted(each for each in tiles if each is not None)
        shown = ", ".join(known[:_SHOWN_TILES]) + ", ..." * (len(known) > _SHOWN_TILES)
        raise ValueError(f"score.map_tile={tile}: the predictions of {output} are of the tiles {shown or 'of no name'}")
    if rows == unplaced:
        raise ValueError(f"--map: none of the {rows} predictions of {output} has a place on the ground")
    placed = pa.concat_tables(tables)
    flat = pa.concat_arrays(placed["probabilities"].chunks).flatten().to_numpy()
    likeliest = flat.reshape(len(placed), len(names)).argmax(axis=1)
    return GroundPredictions(names, placed, likeliest, metres, unplaced)


def write_map(found: GroundPredictions, file: Path) -> list[Path]:
    """Write the map, and a picture of it beside it; return the paths, the picture's last.

    A GeoTIFF has one coordinate system: if there are several, each gets a file whose name ends with its EPSG code.

    Raises:
        ValueError: A file to replace is no map of ours. Or the map is a GeoTIFF, and the patches are too far apart or
            have too many classes.
    """
    is_geotiff = file.suffix.lower() == ".tif"
    codes = np.unique(found.systems).tolist()
    files = [_of_system(file, code) for code in codes] if is_geotiff and len(codes) > 1 else [file]
    picture = _picture_of(file)
    _refuse_foreign([*files, picture], file)
    if is_geotiff:
        if len(found.class_names) > _NOTHING:
            raise ValueError(f"--map {file}: {len(found.class_names)} classes do not fit a colour table: give .geojson")
        parts = [found.of(code) for code in codes]
        cells = [cell_of(part, file) for part in parts]
        for part, cell, own in zip(parts, cells, files, strict=True):
            _write_geotiff(part, cell, own)
    else:
        _write_geojson(found, file)
    draw(found).savefig(picture, dpi=150, metadata={"Software": _MARK})
    return [*files, picture]


def _write_geojson(found: GroundPredictions, file: Path) -> None:
    """Write one feature per line, because all features of an archive would be gigabytes of Python objects."""
    with file.open("w") as stream:
        stream.write(_START)
        for number, feature in enumerate(features(found)):
            stream.write((",\n" if number else "\n") + json.dumps(feature))
        stream.write("\n]}\n")


def features(found: GroundPredictions) -> Iterator[dict[str, Any]]:
    """Yield a square for each patch, in longitude and latitude.

    Source: RFC 7946, whose coordinates are WGS 84.
    """
    colours = class_colours(len(found.class_names))
    known = found.table.select(["id", "labels", "probabilities", "model_version"])
    for start in range(0, len(found.table), _FEATURES_AT_ONCE):
        block = slice(start, start + _FEATURES_AT_ONCE)
        rings = rings_of(found.corners[block], found.systems[block], found.metres)
        rows = known.slice(start, _FEATURES_AT_ONCE).to_pylist()
        for ring, row, index in zip(rings.tolist(), rows, found.likeliest[block].tolist(), strict=True):
            yield {
                "type": "Feature",
                "geometry": {"type": "Polygon", "coordinates": [ring]},
                "properties": {
                    "id": row["id"],
                    "labels": row["labels"],
                    "likeliest": found.class_names[index],
                    "probability": round(row["probabilities"][index], 4),
                    "model_version": row["model_version"],
                    "fill": colours[index],
                },
            }


def _write_geotiff(found: GroundPredictions, cell: float, file: Path) -> None:
    """Write the index of the likeliest class, with a colour table; 255 where there is no patch.

    If patches overlap, as tiles do, the last one is shown.
    """
    corners = found.corners
    pixels = raster_of(found, cell, _NOTHING)
    rows, columns = pixels.shape
    profile = {
        "driver": "GTiff",
        "dtype": "uint8",
        "count": 1,
        "height": rows,
        "width": columns,
        "nodata": _NOTHING,
        "crs": f"EPSG:{found.systems[0]}",
        "transform": rasterio.Affine(cell, 0, corners[:, 0].min(), 0, -cell, corners[:, 1].max()),
        "compress": "deflate",
    }
    with rasterio.open(file, "w", **profile) as raster:
        raster.write(pixels.astype(np.uint8), 1)
        colours = class_colours(len(found.class_names))
        raster.write_colormap(1, {index: (*bytes.fromhex(colour[1:]), 255) for index, colour in enumerate(colours)})
        raster.update_tags(TIFFTAG_SOFTWARE=_MARK)
        raster.update_tags(1, **{f"class_{index}": name for index, name in enumerate(found.class_names)})


def draw(found: GroundPredictions) -> Figure:
    """Draw an overview if there are several coordinate systems, a map of each, and a legend that counts the patches."""
    codes = [code for code, _ in Counter(found.systems.tolist()).most_common()]
    overviews = int(len(codes) > 1)
    columns = min(3, overviews + len(codes))
    rows = math.ceil((overviews + len(codes)) / columns)
    figure = Figure(figsize=(_INCHES, 2.2 + 0.95 * _INCHES * rows / columns), layout="constrained")
    colours = class_colours(len(found.class_names))
    scheme = ListedColormap(colours).with_extremes(under="none")
    if overviews:
        _draw_overview(figure.add_subplot(rows, columns, 1), found, scheme)
    for place, code in enumerate(codes, 1 + overviews):
        axis, own = figure.add_subplot(rows, columns, place), found.of(code)
        corners = own.corners
        width, height = np.ptp(corners, axis=0).tolist()
        margin = max(own.metres, 0.03 * max(width, height))
        # One image for all patches: an artist for each would take minutes and gigabytes.
        cell = max((max(width, height) + own.metres) / _CELLS_OF_A_PICTURE, 1.0)
        pixels = raster_of(own, cell, -1)
        _draw_squares(axis, corners + np.array([0.5, -0.5]) * own.metres, own, scheme)
        left, top = corners[:, 0].min(), corners[:, 1].max()
        extent = (left, left + pixels.shape[1] * cell, top - pixels.shape[0] * cell, top)
        axis.imshow(pixels, cmap=scheme, vmin=-0.5, vmax=len(colours) - 0.5, extent=extent, interpolation="nearest")
        axis.set(
            xlim=(extent[0] - margin, extent[1] + margin), ylim=(extent[2] - margin, extent[3] + margin), aspect="equal"
        )
        axis.set_title(f"EPSG {code}, {len(corners):,} {'patch' if len(corners) == 1 else 'patches'}", fontsize=9)
        axis.ticklabel_format(style="plain", useOffset=False)
        axis.tick_params(labelsize=7)
        axis.tick_params(axis="x", labelrotation=30)
        if width < height / 2:  # the two labels would overlap
            axis.set_xticks([left])
    counts = Counter(found.likeliest.tolist())
    handles = [
        Patch(color=colours[index], label=f"{shorten(found.class_names[index], _LONGEST_NAME)} ({count:,})")
        for index, count in counts.most_common()
    ]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
        title="likeliest class (patches)",
    )
    return figure


def _draw_overview(axis: Axes, found: GroundPredictions, scheme: Colormap) -> None:
    """Draw the patches of all coordinate systems by longitude and latitude, with each system's code below it."""
    centres = rings_of(found.corners, found.systems, found.metres)[:, :4].mean(axis=1)
    _draw_squares(axis, centres, found, scheme)
    codes = np.unique(found.systems)
    axis.set_xticks([centres[found.systems == code, 0].mean() for code in codes], codes, rotation=45)
    axis.set_aspect(1 / math.cos(math.radians(centres[:, 1].mean())), adjustable="datalim")
    axis.set_title(f"overview, {len(centres):,} patches in {len(codes)} zones", fontsize=9)
    axis.tick_params(labelsize=7)


def _draw_squares(axis: Axes, centres: NDArray[np.float64], found: GroundPredictions, scheme: Colormap) -> None:
    """Draw a square of a few dots at each patch."""
    xs, ys = centres.T
    last = len(found.class_names) - 0.5
    axis.scatter(xs, ys, _LEAST_AREA, found.likeliest, marker="s", cmap=scheme, vmin=-0.5, vmax=last, linewidths=0)


def class_colours(classes: int) -> list[str]:
    """Return a colour for each class as `#rrggbb`, the same for every map with this number of classes."""
    colours = colormaps["tab20"](range(classes)) if classes <= 20 else colormaps["turbo"](np.linspace(0, 1, classes))
    return [to_hex(colour) for colour in colours]
