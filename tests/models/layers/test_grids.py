"""Which shifts move image groups of different resolution alike."""

import pytest

from models.layers.grids import coarsening, shift_units

SENTINEL2 = {"bands_10m": (120, 120), "bands_20m": (60, 60), "bands_60m": (20, 20)}


@pytest.mark.parametrize(
    ("sizes", "length", "unit"),
    [
        ({"rgb": (32, 32)}, 4, (1, 1)),
        (SENTINEL2, 12, (6, 6)),
        ({name: SENTINEL2[name] for name in ("bands_10m", "bands_20m")}, 4, (2, 2)),
        # 2 and 3 pixels: only every sixth is the edge of a pixel in both.
        ({"a": (12, 12), "b": (6, 6), "c": (4, 4)}, 6, (6, 6)),
    ],
)
def test_the_unit_is_what_a_pixel_of_every_group_covers(sizes, length, unit):
    assert shift_units(sizes, length, "padding") == unit


def test_a_group_may_be_coarser_in_one_direction():
    assert coarsening({"wide": (8, 24), "half": (4, 24)}) == {"wide": (1, 1), "half": (2, 1)}


@pytest.mark.parametrize(
    ("sizes", "length", "message"),
    [
        (SENTINEL2, 4, r"one pixel of group 'bands_60m' covers 6 x 6 .* padding of 4 cuts it: a multiple of 6 fits"),
        (
            {"a": (12, 12), "b": (5, 12)},
            4,
            r"group 'b' has 5 x 12 pixels, and none of them covers whole pixels .* 12 x 12",
        ),
        ({"rgb": (8, 6)}, 7, "a padding of 7 is larger than the images, 6 pixels"),
    ],
)
def test_groups_that_cannot_be_shifted_alike_are_refused(sizes, length, message):
    with pytest.raises(ValueError, match=message):
        shift_units(sizes, length, "padding")
