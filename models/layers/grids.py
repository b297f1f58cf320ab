"""The geometry of the pixel grids of image groups, without TensorFlow, so that the driver can use it."""

import math
from collections.abc import Mapping

Size = tuple[int, int]
"""Height and width in pixels."""
Sizes = Mapping[str, Size]
"""Height and width by group name; all groups show the same scene."""


def coarsening(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """Return for each group the number of pixels of the finest group that a pixel covers, down and across.

    Raises:
        ValueError: A number is not whole.
    """
    finest = tuple(max(size[axis] for size in sizes.values()) for axis in (0, 1))
    factors = {}
    for name, (height, width) in sizes.items():
        if finest[0] % height or finest[1] % width:
            raise ValueError(
                f"group {name!r} has {height} x {width} pixels, and none of them covers whole pixels of the finest "
                f"group, {finest[0]} x {finest[1]}"
            )
        factors[name] = finest[0] // height, finest[1] // width
    return factors


def shift_units(sizes: Sizes, length: int, name: str) -> tuple[int, int]:
    """Return the smallest shifts, down and across in pixels of the finest group, that are whole pixels in every group.

    Args:
        sizes: The image groups.
        length: Largest shift, or the side of a square, in pixels of the finest group.
        name: Name of the length in errors: "padding" or "cutout".

    Raises:
        ValueError: The length is no multiple of these shifts or larger than the images, or the grids do not fit.
    """
    factors = coarsening(sizes)
    units = math.lcm(*(down for down, _ in factors.values())), math.lcm(*(across for _, across in factors.values()))
    for group, (down, across) in factors.items():
        if length % down or length % across:
            raise ValueError(
                f"one pixel of group {group!r} covers {down} x {across} pixels of the finest group, so that a {name} "
                f"of {length} cuts it: a multiple of {math.lcm(*units)} fits all groups"
            )
    smallest = min(max(size[axis] for size in sizes.values()) for axis in (0, 1))
    if length > smallest:
        raise ValueError(f"a {name} of {length} is larger than the images, {smallest} pixels")
    return units
