"""The bands of the dataset that the network sees, and their channels; this module imports no TensorFlow."""

import itertools
from collections.abc import Sequence

from pipelines.sample import ImageGroup

Channels = tuple[int | None, ...]
"""The channel of the network's input for each band of a group; None: the network does not see the band."""


def band_channels(groups: Sequence[ImageGroup], bands: Sequence[str] | None) -> dict[str, Channels]:
    """Return the channels of each group's bands.

    Args:
        groups: The dataset's image groups.
        bands: `input.bands`; None: all bands in the dataset's order.

    Raises:
        ValueError: The dataset has no band of that name, or more than one.
    """
    known = [name for group in groups for name in group.bands]
    for name in bands or ():
        if known.count(name) != 1:
            number = "no band" if name not in known else f"{known.count(name)} bands"
            raise ValueError(f"input.bands={name}: the dataset has {number} of this name; it has {', '.join(known)}")
    if bands is None:
        numbers = itertools.count()
        return {group.name: tuple(itertools.islice(numbers, len(group.bands))) for group in groups}
    return {group.name: tuple(bands.index(name) if name in bands else None for name in group.bands) for group in groups}


def used_groups(groups: Sequence[ImageGroup], bands: Sequence[str] | None) -> list[ImageGroup]:
    """Return the groups with at least one band that the network sees; these are the model's inputs."""
    channels = band_channels(groups, bands)
    return [group for group in groups if any(channel is not None for channel in channels[group.name])]


def seen_bands(groups: Sequence[ImageGroup], bands: Sequence[str] | None) -> list[str]:
    """Return the names of the network's input channels, in channel order."""
    return list(bands) if bands is not None else [name for group in groups for name in group.bands]
