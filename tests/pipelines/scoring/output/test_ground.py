"""Maps of predictions, read back as other programs read them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import rasterio
from matplotlib.colors import to_hex, to_rgb
from numpy.typing import NDArray
from PIL import Image
from rasterio.warp import transform
from scipy import ndimage

from pipelines.archives.synthetic.scenes import SCENES
from pipelines.sample import ImageGroup
from pipelines.scoring.output.ground import check_map, check_map_file, class_colours, draw, read_ground, write_map
from pipelines.scoring.output.ground_geometry import GroundPredictions, patch_metres
from pipelines.scoring.output.write import PREDICTION_SCHEMA
from pipelines.storage.folder import Location

NAMES = ("Arable land", "Pastures", "Inland waters")
GROUPS = (
    ImageGroup("bands_10m", (120, 120, 4), "uint16", ("B02", "B03", "B04", "B08")),
    ImageGroup("bands_60m", (20, 20, 2), "uint16", ("B01", "B09")),
)

FOUND: tuple[Any, ...] = ([32633, 32629], [600000.0, 500000.0], [5300040.0, 4600000.0], [1, 0])


def ground(epsg: list[int], x0: list[float], y0: list[float], likeliest: list[int]) -> GroundPredictions:
    rows, probabilities = len(epsg), [[0.9 if index == one else 0.1 for index in range(3)] for one in likeliest]
    columns: dict[str, Any] = {
        "id": [f"patch {row}" for row in range(rows)],
        "split": ["test"] * rows,
        "tile": ["33UWP"] * rows,
        "epsg": epsg,
        "x0": x0,
        "y0": y0,
        "probabilities": probabilities,
        "labels": [[NAMES[one]] for one in likeliest],
        "model_version": ["land/3"] * rows,
    }
    table = pa.table([pa.array(columns[field.name], field.type) for field in PREDICTION_SCHEMA], PREDICTION_SCHEMA)
    return GroundPredictions(NAMES, table, np.array(likeliest), 1200.0, 0)


def test_the_side_of_a_patch_follows_from_sentinel_2s_bands() -> None:
    assert (patch_metres(GROUPS), patch_metres(GROUPS[1:])) == (1200, 1200)
    with pytest.raises(ValueError, match=r"--map needs bands of Sentinel-2, .* there are red, green, blue"):
        patch_metres([ImageGroup("image", (64, 64, 3), "uint8", ("red", "green", "blue"))])


def test_a_geotiff_has_one_cell_for_each_patch(tmp_path: Path) -> None:
    found = ground([32633] * 3, [600000.0, 601200.0, 603600.0], [5300040.0, 5300040.0, 5298840.0], [0, 2, 1])
    assert write_map(found, tmp_path / "map.tif") == [tmp_path / "map.tif", tmp_path / "map.png"]
    with rasterio.open(tmp_path / "map.tif") as raster:
        assert (
            raster.crs.to_epsg(),
            raster.bounds.left,
            raster.bounds.top,
            raster.res,
            raster.nodata,
            raster.read(1).tolist(),
        ) == (32633, 600000, 5300040, (1200, 1200), 255, [[0, 2, 255, 255], [255, 255, 255, 1]])
        assert (raster.tags(1)["class_2"], len({raster.colormap(1)[index] for index in range(3)})) == (
            "Inland waters",
            3,
        )
    pixels = picture(tmp_path / "map.png")
    assert min(pixels.shape[:2]) > 600
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 3


def picture(file: Path) -> NDArray[np.uint8]:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def test_the_legend_has_each_class_on_the_map_with_its_patches_and_colour() -> None:
    long = "Land principally occupied by agriculture, with significant areas of natural vegetation"
    found = ground([32633] * 4, [600000.0 + 1200 * column for column in range(4)], [5300040.0] * 4, [2, 0, 2, 2])
    figure = draw(replace(found, class_names=("Arable land", "Pastures", long)))
    (legend,), (axis,), colours = figure.legends, figure.axes, class_colours(3)
    assert (legend.get_title().get_text(), axis.get_title()) == ("likeliest class (patches)", "EPSG 32633, 4 patches")
    # The most frequent class first; no patch is a pasture.
    assert (
        [text.get_text() for text in legend.get_texts()],
        [to_hex(handle.get_facecolor()) for handle in legend.get_patches()],
    ) == ([f"{long[:43]}… (3)", "Arable land (1)"], [colours[2], colours[0]])


@pytest.mark.parametrize("zones", [1, 4, 5, 7, 8])
def test_an_overview_and_each_zone_show_single_patches_far_apart(zones: int, tmp_path: Path) -> None:
    places = [5300040.0 + 1e6 * number / 7 for number in range(8)]
    found = ground(
        np.repeat(32629 + np.arange(zones), 8).tolist(), [600000.0] * 8 * zones, places * zones, [0] * 8 * zones
    )
    titles = [axis.get_title() for axis in draw(found).axes]
    overview = [f"overview, {8 * zones} patches in {zones} zones"] if zones > 1 else []
    assert titles == overview + [f"EPSG {32629 + zone}, 8 patches" for zone in range(zones)]
    (_, file) = write_map(found, tmp_path / "map.geojson")
    seen = (picture(file) == [round(255 * part) for part in to_rgb(class_colours(3)[0])]).all(axis=2)
    squares, count = ndimage.label(seen)
    assert count == 8 * zones * (2 if overview else 1) + 1, "each patch on each map, and the legend"
    assert np.bincount(squares.ravel()).min() >= 4 * 4, "dots of the smallest one"


def test_one_patch_is_no_patches_and_thousands_are_counted() -> None:
    (axis,) = draw(ground([32633], [600000.0], [5300040.0], [1])).axes
    assert (axis.get_title(), [text.get_text() for text in draw(square(40, 32633, 1)).legends[0].get_texts()]) == (
        "EPSG 32633, 1 patch",
        ["Pastures (1,600)"],
    )


def square(side: int, epsg: int | list[int], likeliest: int) -> GroundPredictions:
    """Predictions of one class for a square of patches."""
    row, column = np.divmod(np.arange(side * side), side)
    corners = (600000 + 1200.0 * column).tolist(), (5300040 - 1200.0 * row).tolist()
    return ground(epsg if isinstance(epsg, list) else [epsg] * side**2, *corners, [likeliest] * side**2)


def test_geojson_has_squares_in_longitude_and_latitude(tmp_path: Path) -> None:
    write_map(ground(*FOUND), tmp_path / "map.geojson")
    first, second = json.loads((tmp_path / "map.geojson").read_text())["features"]
    assert first["properties"].items() >= {"likeliest": "Pastures", "probability": 0.9}.items()
    assert second["properties"]["model_version"] == "land/3"
    ring = np.array(first["geometry"]["coordinates"][0])
    assert (ring[0] == ring[-1]).all()
    edges = np.diff(ring, axis=0)
    assert (edges[:-1, 0] * edges[1:, 1] - edges[:-1, 1] * edges[1:, 0] > 0).all(), "against the clock (RFC 7946)"
    back = transform("EPSG:4326", "EPSG:32633", ring[:, 0], ring[:, 1])
    np.testing.assert_allclose(
        back, [[600000, 600000, 601200, 601200, 600000], [5300040, 5298840, 5298840, 5300040, 5300040]], atol=0.5
    )


@pytest.mark.parametrize(
    ("offset", "cell"), [(700.5, 100), (1210.0, 100), (99_960.0, 120), (100_000.0, 400), (100_020.0, 100)]
)
def test_patches_off_a_common_grid_are_drawn_on_the_nearest_cells(offset: float, cell: int, tmp_path: Path) -> None:
    # Tiles of Sentinel-2 begin 99,960, 100,000 or 100,020 m apart.
    write_map(ground([32633, 32633], [600000.0, 600000 + offset], [5300040.0, 5300040.0], [1, 0]), tmp_path / "map.tif")
    with rasterio.open(tmp_path / "map.tif") as raster:
        assert raster.res == (cell, cell)
        pixels = raster.read(1)
        left = raster.bounds.left + cell * int((pixels[0] == 0).argmax())
    assert abs(left - (600000 + offset)) <= cell / 2
    assert ((pixels == 0).sum(axis=1) == 1200 / cell).all()


def test_every_zone_of_a_large_archive_has_a_geotiff(tmp_path: Path) -> None:
    scenes = [(scene.epsg, scene.west, scene.north) for scene in SCENES]
    epsg, x0, y0 = (list(each) for each in zip(*scenes, strict=True))
    files = write_map(ground(epsg, x0, y0, [row % 3 for row in range(len(scenes))]), tmp_path / "map.tif")
    assert (len(files), files[-1].name) == (len(set(epsg)) + 1, "map.png")
    for file in files[:-1]:
        with rasterio.open(file) as raster:
            corners = np.array([[x, y] for code, x, y in scenes if code == raster.crs.to_epsg()])
            values = [value[0] for value in raster.sample(corners + np.array([600.0, -600.0]))]
            assert (file.name, max(raster.shape) <= 20_000) == (f"map-{raster.crs.to_epsg()}.tif", True)
        assert values == [row % 3 for row, scene in enumerate(scenes) if scene[0] == raster.crs.to_epsg()]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_hundred_thousand_patches_are_drawn(tmp_path: Path) -> None:
    side = 317
    row, column = np.divmod(np.arange(side * side), side)
    found = square(side, np.where(column < 200, 32633, 32634).tolist(), 0)
    write_map(replace(found, likeliest=row * 3 // side), tmp_path / "map.geojson")
    with (tmp_path / "map.geojson").open() as stream:
        assert sum(line.startswith('{"type": "Feature", ') for line in stream) == side**2
    assert {tuple(round(255 * part) for part in to_rgb(colour)) for colour in class_colours(3)} <= {
        tuple(colour) for colour in picture(tmp_path / "map.png").reshape(-1, 3)[::7].tolist()
    }


@pytest.mark.parametrize(("name", "message"), [("map.png", r"\.geojson or \.tif"), ("x/map.tif", "there is no folder")])
def test_a_file_that_cannot_be_a_map_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_map_file(str(tmp_path / name))


@pytest.mark.parametrize("place", ["output/map.geojson", "output/new/map.tif", "link/map.tif", "x/../output/map.tif"])
def test_a_map_in_a_folder_of_predictions_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "link").symlink_to("output")
    (tmp_path / "x").mkdir()
    folders = {"--input": Location.at(tmp_path / "input"), "--output": Location.at(tmp_path / "output")}
    with pytest.raises(ValueError, match=r"^--map .* is in --output .*/output: choose a file outside of that folder$"):
        check_map(tmp_path / place, folders)
    check_map(tmp_path / "output.tif", folders)


@pytest.mark.parametrize("name", ["map.geojson", "map.tif"])
def test_a_map_replaces_an_earlier_map(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    for systems in (2, 1, 2):
        check_map(file, {})
        assert all(path.stat().st_size for path in write_map(ground(*(column[:systems] for column in FOUND)), file))
    (tmp_path / "map.png").write_bytes(b"")
    check_map(file, {})


@pytest.mark.parametrize(
    ("name", "foreign", "systems"),
    [
        ("map.geojson", "map.geojson", 2),
        ("map.geojson", "map.png", 2),
        ("map.tif", "map.tif", 1),
        ("map.tif", "map.png", 1),
        ("map.tif", "map-32633.tif", 2),
    ],
)
def test_a_map_replaces_no_other_file(name: str, foreign: str, systems: int, tmp_path: Path) -> None:
    file, other = tmp_path / name, tmp_path / foreign
    if other.suffix == ".geojson":
        other.write_text('{"type": "FeatureCollection", "features": []}')
    else:
        Image.new("L", (4, 4)).save(other)
    before = other.read_bytes()
    message = f"^--map {file} would replace {other}, which is no map of groundswell: move or remove {foreign}, or"
    with pytest.raises(ValueError, match=message):
        check_map(file, {})
    with pytest.raises(ValueError, match=message):
        write_map(ground(*(column[:systems] for column in FOUND)), file)
    assert ([path.name for path in tmp_path.iterdir()], other.read_bytes()) == ([foreign], before)


def test_predictions_without_a_place_make_no_map(tmp_path: Path) -> None:
    found, folder = ground([32633], [600000.0], [5300040.0], [1]).table, Location.at(tmp_path)
    nowhere = found.set_column(3, PREDICTION_SCHEMA.field("epsg"), pa.nulls(1, pa.int32()))
    pq.write_table(nowhere, tmp_path / "part.parquet")
    (tmp_path / "predictions.json").write_text(json.dumps({"parts": [{"file": "part.parquet"}], "class_names": NAMES}))
    with pytest.raises(ValueError, match=r"none of the 1 predictions .* has a place on the ground"):
        read_ground(folder, GROUPS)
    pq.write_table(pa.concat_tables([nowhere, found]), tmp_path / "part.parquet")
    with pytest.raises(ValueError, match=r"^score\.map_tile=32TMT: the predictions of .* are of the tiles 33UWP$"):
        read_ground(folder, GROUPS, "32TMT")
    for tile in (["33UWP"], []):
        read = read_ground(folder, GROUPS, *tile)
        assert (len(read.table), read.likeliest.tolist(), bool(tile) or read.unplaced == 1) == (1, [1], True)


def test_a_geotiff_that_would_be_too_large_is_refused(tmp_path: Path) -> None:
    found = ground([32629, 32633, 32633], [500000.0, 600000.0, 600000.0 + 1200 * 20_000], [5300040.0] * 3, [0, 0, 1])
    with pytest.raises(ValueError, match=r"20,001 patches in a row are too many for one GeoTIFF: give \.geojson"):
        write_map(found, tmp_path / "map.tif")
    assert list(tmp_path.iterdir()) == []  # nor of the system whose patches fit
