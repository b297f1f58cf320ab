"""`dataset.json`: what a dataset holds, written last, so that a dataset without it is not one."""

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipelines.sample import ImageGroup, Task
from pipelines.storage import Folder

FILE_NAME = "dataset.json"
FORMAT_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Shard(_Part):
    """One Parquet file."""

    file: str
    """Path relative to the dataset's folder."""
    row_groups: tuple[int, ...]
    """Rows of each row group, in file order."""
    size: int
    """File size in bytes."""

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_groups)


class Split(_Part):
    """One split: its files in reading order, and how many samples carry each class."""

    shards: tuple[Shard, ...]
    class_counts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Samples of the split."""
        return sum(shard.rows for shard in self.shards)


class BandStatistics(_Part):
    """Per-band mean and standard deviation of the training split's pixels, in stored units."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Manifest(_Part):
    """The contract on disk between `prepare` and everything that reads."""

    format_version: int = Field(default=FORMAT_VERSION)
    archive: str
    """Kind of the archive that it was made from."""
    task: Task
    class_names: tuple[str, ...]
    groups: tuple[ImageGroup, ...]
    splits: dict[str, Split]
    statistics: dict[str, BandStatistics]
    """By image group."""
    settings: dict[str, int]
    """What shaped the rows and files: seed, row-group size, row groups per shard."""
    source_fingerprint: str
    """Digest of the archive's metadata."""
    skipped: dict[str, int] = Field(default_factory=dict)
    """Samples of the archive that are not in the dataset, by reason."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of the whole manifest: names this dataset in tracked runs."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def write_manifest(manifest: Manifest, dataset: Folder | Path | str) -> None:
    """Write `dataset.json` atomically: it is whole or absent."""
    Folder.at(dataset).write(FILE_NAME, json.dumps(manifest.model_dump(mode="json"), indent=1).encode())


def read_manifest(dataset: Folder | Path | str) -> Manifest:
    """Read and check the manifest of a dataset.

    Raises:
        FileNotFoundError: `dataset` has no `dataset.json`.
        ValueError: The manifest is damaged or of another format version.
        RuntimeError: The storage cannot be used.
    """
    folder = Folder.at(dataset)
    path = f"{folder}/{FILE_NAME}"
    try:
        data = folder.read(FILE_NAME)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise FileNotFoundError(
            f"{folder} is not a finished dataset: it has no {FILE_NAME}; make it with `groundswell prepare`, "
            "or point dataset.path at one"
        ) from None
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from None
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {manifest.format_version}, this program reads {FORMAT_VERSION}")
    return manifest
