"""Synthetic BigEarthNet patches as an archive without files: each patch is drawn when it is read."""

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from conf.sections.archives import SyntheticConfig
from pipelines.archives.archive import REJECTED_SCHEMA, ArchiveDescription, ArchiveIndex, Georeference, index_table
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19
from pipelines.archives.bigearthnet.patch import GROUPS, dates_and_seasons
from pipelines.archives.synthetic.landscape import draw_patches, land_cover, render
from pipelines.archives.synthetic.scenes import check_counts, patch
from pipelines.sample import SPLITS

KIND = "synthetic"

_FORMAT = 1  # increased when the same seed draws other pixels
PATCHES_PER_TASK = 256
PATCHES_IN_PROCESS = 1024  # about a second of work, the time that starting processes takes


@dataclass(frozen=True)
class SyntheticBigEarthNet:
    """The patches that `synthetic.generate_bigearthnet_v2` writes as files, with the same ids, labels and pixels."""

    root: str = ""
    """Unused, because there are no files."""
    _: KW_ONLY
    train: int
    """Number of patches in the training split."""
    validation: int
    """Number of patches in the validation split."""
    test: int
    """Number of patches in the test split."""
    seed: int = SyntheticConfig.default("seed")
    """Seed of everything random, 0 or more."""

    def __post_init__(self) -> None:
        check_counts(self._counts())

    @property
    def description(self) -> ArchiveDescription:
        """Classes and image groups of BigEarthNet v2.0."""
        return ArchiveDescription(KIND, "multi_label", BIGEARTHNET_19, GROUPS)

    def index(self) -> ArchiveIndex:
        """List the patches by number, which is also their path.

        Labels come from the patch's map of land covers, which takes about a millisecond per patch and core to draw.
        Spawned processes draw many patches, so a script calls this below `if __name__ == "__main__":`.
        """
        counts = self._counts()
        numbers = range(sum(counts.values()))
        processes = 1 if len(numbers) <= PATCHES_IN_PROCESS else os.cpu_count() or 1
        draw = functools.partial(_labels_of_patch, self.seed)
        patches = [patch(number) for number in numbers]
        ids = pa.array([place.id for place in patches], pa.string())
        columns = {
            "id": ids,
            "split": np.repeat(list(counts), list(counts.values())),
            "labels": list(draw_patches(draw, len(numbers), processes, PATCHES_PER_TASK)),
            "paths": [[str(number)] for number in numbers],
            "country": [place.scene.country for place in patches],
            "tile": [place.scene.tile for place in patches],
            "flags": [[] for _ in numbers],
            **dates_and_seasons(ids),
        }
        return ArchiveIndex(index_table(columns), REJECTED_SCHEMA.empty_table())

    @property
    def read_settings(self) -> dict[str, int | None]:
        """Seed of the pixels, and the version of the code that draws them."""
        return {"synthetic_format": _FORMAT, "synthetic_seed": self.seed}

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference:
        """Draw the 12 bands of one patch: uint16 `(120, 120, 4)`, `(60, 60, 6)` and `(20, 20, 2)`."""
        images, _ = render(self.seed, int(paths[0]), GROUPS)
        for name, image in images.items():
            out[name][...] = image
        place = patch(int(paths[0]))
        return Georeference(place.scene.epsg, place.west, place.north)

    def _counts(self) -> dict[str, int]:
        return dict(zip(SPLITS, (self.train, self.validation, self.test), strict=True))


def _labels_of_patch(seed: int, number: int) -> tuple[int, ...]:
    return land_cover(seed, number)[1]
