"""The interface between a raw archive and the dataset: plan on the driver, read on the executors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.sample import ImageGroup, Task

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

`size` is the bytes of the sample's file where the listing tells them. The further columns are what the archive's
metadata knows of the image: `tile` of the Sentinel-2 grid (`33UWP`), `season` (`winter`, `spring`, `summer`, `autumn`),
`flags` (`snow`, `cloud_or_shadow`; an empty list says that there is neither). What is unknown is null.
"""

REJECTED_SCHEMA = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in ("id", "file", "reason", "detail")]
)
"""One row per sample that cannot be used. `reason` is one of few short texts, `detail` says what was found."""


@dataclass(frozen=True)
class ArchiveIndex:
    """All samples that the archive's metadata names.

    The ids and splits of `samples` depend on the metadata alone, not on which folders exist now. So the same samples
    get the same places in the dataset, also when some are missing today and there tomorrow.
    """

    samples: pa.Table
    """`INDEX_SCHEMA`, in a stable order."""
    rejected: pa.Table
    """`REJECTED_SCHEMA`: what the metadata or the listing holds and is no sample: an unknown label, a repeated id."""
    unusable: pa.Table = field(default_factory=REJECTED_SCHEMA.empty_table)
    """`REJECTED_SCHEMA`, at most one row per sample: those of `samples` that cannot be read now, as their folder is
    missing. What their files would tell, such as labels, is empty in `samples`."""


def index_table(columns: Mapping[str, Any]) -> pa.Table:
    """A table of `INDEX_SCHEMA`.

    Args:
        columns: Columns by name: an array, or a sequence of Python values. A nullable column that is left out is null.

    Raises:
        KeyError: A column that is required is left out.
    """
    rows = len(columns["id"])
    arrays = []
    for field_ in INDEX_SCHEMA:
        values = columns.get(field_.name) if field_.nullable else columns[field_.name]
        if isinstance(values, pa.Array | pa.ChunkedArray):
            arrays.append(values.cast(field_.type))
        else:
            arrays.append(pa.nulls(rows, field_.type) if values is None else pa.array(values, field_.type))
    return pa.table(arrays, schema=INDEX_SCHEMA)


class Georeference(NamedTuple):
    """The place of an image on the ground."""

    epsg: int
    """Code of the coordinate reference system."""
    x0: float
    """Left edge of the image, in the units of the system (metres in UTM)."""
    y0: float
    """Upper edge of the image."""


class BadRecordError(ValueError):
    """A sample that cannot be read as the archive promises."""

    def __init__(self, file: str | PathLike[str], reason: str, detail: str = "") -> None:
        """Name the file and why.

        Args:
            file: The file or folder at fault.
            reason: One of few short texts, by which bad records are counted, e.g. `wrong size`.
            detail: Text that says what was found and what was expected.
        """
        self.file, self.reason, self.detail = str(file), reason, detail
        super().__init__(f"{file}: {reason}" + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> tuple[type["BadRecordError"], tuple[str, str, str]]:
        """Pickle all three parts, so that the error can be sent from an executor."""
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


class Archive(Protocol):
    """A raw archive. It is small and picklable, because it is sent to the executors."""

    @property
    def root(self) -> str:
        """The folder or URL of the archive; empty if it has no files."""

    @property
    def description(self) -> ArchiveDescription:
        """Classes, task and image groups."""

    def index(self) -> ArchiveIndex:
        """List every sample (driver only).

        Raises:
            FileNotFoundError: The archive or its metadata is missing.
            ValueError: It is empty, or its metadata cannot be read.
        """

    @property
    def read_settings(self) -> Mapping[str, int | str | None]:
        """Settings that decide what `read` gives and that neither index nor description shows, by name."""

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
        """Read one sample into `out`, which has an array of the right shape and dtype for each image group (executors).

        After an error `out` holds anything.

        Args:
            paths: The sample's `paths` of the index.
            out: Every pixel of every group is written.

        Returns:
            Where the sample lies, if its image files say so.

        Raises:
            BadRecordError: A file is missing, damaged, of the wrong size or dtype.
        """


def read_into(archive: Archive, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> Georeference | None:
    """Read one sample as `Archive.read` does, and make sure that floating-point pixels are finite numbers.

    Raises:
        BadRecordError: As `Archive.read`, or a band has a NaN or an infinite value.
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
        BadRecordError: As `read_into`.
    """
    out = {group.name: np.empty(group.shape, group.dtype) for group in archive.description.groups}
    read_into(archive, paths, out)
    return out
