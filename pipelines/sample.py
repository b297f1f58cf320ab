"""The properties of a sample that archives, datasets and training share: images, task and split."""

import math
from dataclasses import dataclass
from typing import Literal

Task = Literal["multi_label", "single_label"]
SettingValue = int | str | list[str] | None
ID_SETTING, KEPT_SETTING = "id_column", "kept_columns"
"""Settings of `Archive.read_settings`: the column of the ids, and the names of the user's own columns."""

TRAINING_SPLIT = "train"
"""The training split; band statistics are computed on it."""
VALIDATION_SPLIT = "validation"
"""The split on which a model is scored after each epoch."""
TEST_SPLIT = "test"
SPLITS = (TRAINING_SPLIT, VALIDATION_SPLIT, TEST_SPLIT)


@dataclass(frozen=True)
class ImageGroup:
    """Bands of one sample that share shape and dtype, stored as one column."""

    name: str
    """Column name, e.g. `bands_10m`."""
    shape: tuple[int, int, int]
    """`(height, width, bands)`, in pixels at the bands' native resolution."""
    dtype: str
    """Numpy name of the stored dtype, e.g. `uint16`."""
    bands: tuple[str, ...]
    """Band names in the order of the last axis, e.g. `("B02", "B03", "B04", "B08")`."""

    def __post_init__(self) -> None:
        if len(self.bands) != self.shape[2]:
            raise ValueError(f"image group {self.name!r}: {len(self.bands)} band names for shape {self.shape}")
        if min(self.shape) < 1 or math.prod(self.shape) > 2**31:
            raise ValueError(f"image group {self.name!r}: no sample has the shape {self.shape}")
