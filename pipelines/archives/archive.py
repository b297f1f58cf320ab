"""The interface between a raw archive and the dataset: plan on the driver, read on the executors."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.dataset.schema import ImageGroup, Task

INDEX_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.field("item", pa.int16(), nullable=False)), nullable=False),
        pa.field("path", pa.string(), nullable=False),
    ]
)
"""One row per sample: unique id, split name, class indices, path relative to the archive's root."""


class BadRecordError(ValueError):
    """A sample that cannot be read as the archive promises: names the file and the reason."""


@dataclass(frozen=True)
class ArchiveDescription:
    """What every sample of one archive has in common."""

    kind: str
    """Name in the table of archives, e.g. `bigearthnet_v2`."""
    task: Task
    class_names: tuple[str, ...]
    """Ordered; a class index anywhere in the project is a position in this tuple."""
    groups: tuple[ImageGroup, ...]


class Archive(Protocol):
    """A raw archive on disk; small and picklable, because it travels to the executors."""

    @property
    def description(self) -> ArchiveDescription:
        """Classes, task and image groups."""

    def index(self) -> pa.Table:
        """List every sample, in a stable order, as a table of `INDEX_SCHEMA` (driver only).

        Raises:
            FileNotFoundError: The archive or its metadata is missing.
            ValueError: It is empty, its metadata is malformed, or it names samples that are not there.
        """

    def fingerprint(self) -> str:
        """Hex digest of what the samples are: changes when the archive's metadata does (driver only)."""

    def read(self, path: str) -> dict[str, NDArray[np.generic]]:
        """Read the image groups of one sample, each `(height, width, bands)` (executors).

        Raises:
            BadRecordError: A file is missing, truncated, of the wrong size or dtype.
        """
