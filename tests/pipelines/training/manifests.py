"""The manifest of a small dataset, for tests that read no images."""

from collections.abc import Mapping
from typing import Any

from pipelines.dataset.format.manifest import BandStatistics, Manifest, Shard, Split
from pipelines.sample import ImageGroup


def rgb_manifest(
    shape: tuple[int, int, int] = (32, 32, 3), splits: Mapping[str, tuple[int, ...]] | None = None, **changes: Any
) -> Manifest:
    """RGB images of two classes, with one label each unless `changes` say so.

    Args:
        shape: Height, width and bands of the images.
        splits: Samples of each class in each split; none of several labels.
        changes: Other fields of the manifest.
    """
    fields = {
        "archive": "image_folder",
        "task": "single_label",
        "class_names": ("water", "land"),
        "groups": (ImageGroup("rgb", shape, "uint8", ("red", "green", "blue")),),
        "splits": {name: split_of(name, sum(counts), counts) for name, counts in (splits or {}).items()},
        "statistics": {"rgb": BandStatistics(mean=(90.0,) * 3, std=(40.0,) * 3)},
        "settings": {},
        "read_settings": {},
        "source_fingerprint": "abc",
    }
    return Manifest(**(fields | changes))


def split_of(name: str, rows: int, counts: tuple[int, ...]) -> Split:
    """A split of so many samples in one row group; none where it is empty."""
    shard = Shard(file=f"{name}/a.parquet", row_groups=(rows,) if rows else (), size=1, content_digest="0")
    return Split(shards=(shard,), class_counts=counts)
