"""Samples as people see them."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from pipelines.dataset.report.figures import preview, visible
from pipelines.sample import ImageGroup

SENTINEL_2 = ("B02", "B03", "B04", "B08")


@pytest.mark.parametrize(
    ("bright", "colour"),
    [("B04", (255, 0, 0)), ("B03", (0, 255, 0)), ("B02", (0, 0, 255)), ("B08", (0, 0, 0))],
)
@pytest.mark.parametrize("bands", [SENTINEL_2, SENTINEL_2[::-1]], ids=",".join)
def test_bands_of_sentinel_2_are_seen_as_red_green_and_blue(
    bands: tuple[str, ...], bright: str, colour: tuple[int, int, int]
) -> None:
    groups = [
        ImageGroup("bands_60m", (2, 2, 2), "uint16", ("B01", "B09")),
        ImageGroup("bands_10m", (12, 12, 4), "uint16", bands),
    ]
    images = {"bands_60m": np.full((2, 2, 2), 9000, np.uint16), "bands_10m": np.full((12, 12, 4), 200, np.uint16)}
    images["bands_10m"][..., bands.index(bright)] = 3000
    pixels = visible(images, groups)
    assert (pixels.shape, pixels.dtype, {tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}) == (
        (12, 12, 3),
        np.dtype(np.uint8),
        {colour},
    )
    png = base64.b64decode(preview(images, groups).removeprefix("data:image/png;base64,"))
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.getpixel((0, 0))) == ("RGB", colour)


def test_a_bright_corner_is_where_it_is_in_the_image() -> None:
    image = np.zeros((12, 12, 4), np.uint16)
    image[:3, 6:, 2] = 3000  # rows, columns, B04
    pixels = visible({"image": image}, [ImageGroup("image", image.shape, "uint16", SENTINEL_2)])
    assert np.argwhere(pixels[..., 0] == 255).tolist() == [[row, column] for row in range(3) for column in range(6, 12)]
    assert not pixels[..., 1:].any()


def test_three_8_bit_bands_are_seen_as_they_are_and_others_in_grey() -> None:
    image = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)
    assert (visible({"rgb": image}, [ImageGroup("rgb", (2, 2, 3), "uint8", ("red", "green", "blue"))]) == image).all()
    grey = visible({"radar": image[..., :2]}, [ImageGroup("radar", (2, 2, 2), "uint8", ("VV", "VH"))])
    assert (grey == image[..., :1]).all(), "the first band, three times"
