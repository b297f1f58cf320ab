"""The archives that can be opened by name."""

from collections.abc import Callable

from pipelines.archives.archive import Archive
from pipelines.archives.bigearthnet_v2 import BigEarthNetV2

ARCHIVES: dict[str, Callable[[str], Archive]] = {"bigearthnet_v2": BigEarthNetV2}
"""Constructor of every kind of archive; takes the archive's root folder."""


def open_archive(kind: str, root: str) -> Archive:
    """Open the archive of the given kind; nothing is read before `index` or `read` is called.

    Raises:
        ValueError: There is no such kind.
    """
    if kind not in ARCHIVES:
        raise ValueError(f"archive kind {kind!r} is unknown, expected one of: {', '.join(sorted(ARCHIVES))}")
    return ARCHIVES[kind](root)
