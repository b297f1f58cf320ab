"""The interface between a raw archive and the dataset: the driver plans, the executors read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.sample import ImageGroup, SettingValue, Task

MOST_CLASSES = 2**15 - 1
"""Limit to the classes of an archive, whose numbers have 16 bits."""
INDEX_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("labels", pa.list_(pa.field("item", pa.int16(), nullable=False)), nullable=False),
        pa.field("paths", pa.list_(pa.field("item", pa.string(), nullable=False)), nullable=False),
        pa.field("size", pa.int64()),
        pa.field("country", pa.string()),
        pa.field("season", pa.string()),
        pa.field("tile", pa.string()),
        pa.field("acquisition_date", pa.date32()),
        pa.field("flags", pa.list_(pa.field("item", pa.string(), nullable=False))),
    ]
)
"""One row per sample: unique id, split name, class indices, and its files or folders relative to the archive's root.

`size` is the size of the sample's file in bytes, where the listing shows it. The further columns hold the archive's
metadata of the image: `tile` of the Sentinel-2 grid (`33UWP`), `season` (`winter`, `spring`, `summer`, `autumn`),
`flags` (`snow`, `cloud_or_shadow`; an empty list means neither). Unknown values are null.
"""

RESERVED_NAMES = frozenset(
    {*INDEX_SCHEMA.names, "label_names", "crc32c", "epsg", "x0", "y0", "probabilities", "model_version"}
)
"""Names of our columns in indexes, datasets and predictions, beside the image groups."""

REJECTED_SCHEMA = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in ("id", "file", "reason", "detail")]
)
"""One row per sample that cannot be used. `reason` is one of a few short texts, `detail` says what was found."""


@dataclass(frozen=True)
class ArchiveIndex:
    """All samples in the archive's metadata.

    The ids and splits of `samples` depend only on the metadata, not on the folders that exist now. So the same samples
    get the same positions in the dataset, even if some folders are missing today and exist tomorrow.
    """

    samples: pa.Table
    """`INDEX_SCHEMA`, in a stable order. The user's own columns may follow, which travel to the dataset and the
    predictions; their names differ from `RESERVED_NAMES`, and `read_settings` lists them."""
    rejected: pa.Table
    """`REJECTED_SCHEMA`: entries of metadata or listing that are no samples: an unknown label, a repeated id."""
    unusable: pa.Table = field(default_factory=REJECTED_SCHEMA.empty_table)
    """`REJECTED_SCHEMA`, at most one row per sample: samples that cannot be read now, because their folder is missing.

    `samples` lacks the values that their files contain, such as labels."""


def index_table(columns: Mapping[str, Any], schema: pa.Schema = INDEX_SCHEMA) -> pa.Table:
    """Build a table of `INDEX_SCHEMA`, or of another schema with the column `id`.

    Args:
        columns: Columns by name: an array, or a sequence of Python values. Missing nullable columns become null.
        schema: Names, types and order of the columns.

    Raises:
        KeyError: A required column is missing.
    """
    unknown = [each for each in schema if each.nullable and columns.get(each.name) is None]
    nulls = {each.name: pa.nulls(len(columns["id"]), each.type) for each in unknown}
    return pa.table({**columns, **nulls}, schema=schema)


def kept_fields(samples: pa.Schema) -> list[pa.Field]:
    """Return the user's own columns in the schema of an index."""
    return [each for each in samples if each.name not in INDEX_SCHEMA.names]


class Georeference(NamedTuple):
    """The location of an image on the ground."""

    epsg: int
    """Code of the coordinate reference system."""
    x0: float
    """Left edge of the image, in the units of the system (metres in UTM)."""
    y0: float
    """Upper edge of the image."""


class BadRecordError(ValueError):
    """A sample that cannot be read as the archive promises."""

    def __init__(self, file: str | PathLike[str], reason: str, detail: str = "") -> None:
        """Name the file and the reason.

        Args:
            file: Path of the bad file or folder.
            reason: One of a few short texts, e.g. `wrong size`; bad records are counted by it.
            detail: Text that says what was found and what was expected.
        """
        self.file, self.reason, self.detail = str(file), reason, detail
        super().__init__(f"{file}: {reason}" + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> tuple[type["BadRecordError"], tuple[str, str, str]]:
        """Pickle all three parts, so that an executor can send the error."""
        return type(self), (self.file, self.reason, self.detail)


@dataclass(frozen=True)
class ArchiveDescription:
    """The properties that all samples of one archive share."""

    kind: str
    """Name in the table of archives, e.g. `bigearthnet_v2`."""
    task: Task
    class_names: tuple[str, ...]
    """Ordered; a class index anywhere in the project is a position in this tuple."""
    groups: tuple[ImageGroup, ...]

    def __post_init__(self) -> None:
        if len(self.class_names) > MOST_CLASSES:
            raise ValueError(
                f"{self.kind}: {len(self.class_names):,} classes, and at most {MOST_CLASSES:,} are possible"
            )


class Archive(Protocol):
    """A raw archive: a small object that is pickled and sent to the executors."""

    @property
    def root(self) -> str:
        """Folder or URL of the archive; empty if it has no files."""

    @property
    def description(self) -> ArchiveDescription:
        """Classes, task and image groups."""

    def index(self) -> ArchiveIndex:
        """List every sample (driver only).

        Raises:
            FileNotFoundError: The archive or its metadata is missing.
            ValueError: The archive is empty, or its metadata cannot be read.
        """

    @property
    def read_settings(self) -> Mapping[str, SettingValue]:
        """Settings that decide the result of `read` and are not in the description, by name."""

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
        """Read one sample into `out`, one array of the right shape and dtype per image group (executors).

        After an error the content of `out` is undefined.

        Args:
            paths: The sample's `paths` in the index.
            out: Arrays by image group; every pixel is written.

        Returns:
            Location of the sample, if its image files contain it.

        Raises:
            BadRecordError: A file is missing, damaged, or of the wrong size or dtype.
        """


def read_into(archive: Archive, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
    """Read one sample with `Archive.read`, and make sure that floating-point pixels are finite numbers.

    Raises:
        BadRecordError: `Archive.read` fails, or a band has a NaN or an infinite value.
    """
    place = archive.read(paths, out)
    for group in archive.description.groups:
        pixels = out[group.name]
        if pixels.dtype.kind != "f" or np.isfinite(pixels).all():
            continue
        wrong = np.count_nonzero(~np.isfinite(pixels), axis=(0, 1))
        band = int(np.flatnonzero(wrong)[0])
        root = f"{archive.root.rstrip('/')}/" if archive.root else ""
        raise BadRecordError(
            f"{root}{', '.join(paths)}, band {group.bands[band]} of {group.name}",
            "NaN" if np.isnan(pixels[..., band]).any() else "infinite value",
            f"{wrong[band]} of {pixels[..., band].size} pixels",
        )
    return place


def read_sample(archive: Archive, paths: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read one sample into new arrays, by image group.

    Raises:
        BadRecordError: `read_into` fails.
    """
    out = {group.name: np.empty(group.shape, group.dtype) for group in archive.description.groups}
    read_into(archive, paths, out)
    return out
