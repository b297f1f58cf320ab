"""`dataset.json` describes a dataset. It is written last, so a folder without it is not a dataset.

It contains a digest of the file itself, a digest of each shard's plain columns, and a checksum for each row
(`rows.row_checksum`). The format may gain fields: a reader ignores unknown ones.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipelines.machine.console import escape
from pipelines.machine.json_text import parse_json
from pipelines.sample import KEPT_SETTING, ImageGroup, SettingValue, Task
from pipelines.storage.folder import Location
from pipelines.storage.locations import inside

FILE_NAME = "dataset.json"
FORMAT_VERSION = 2
_DIGEST_KEY = "digest"
_Count = Annotated[int, Field(ge=0, le=2**40)]
_Name = Annotated[str, Field(pattern=r"^\w[\w-]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Shard(_Part):
    """One Parquet file."""

    file: str
    """Path relative to the dataset's folder."""
    row_groups: tuple[_Count, ...]
    """Number of rows of each row group, in file order."""
    size: _Count
    """File size in bytes."""
    content_digest: str
    """SHA-256 of the plain columns, which include every row's checksum (`columns.plain_values`)."""

    @field_validator("file")
    @classmethod
    def _is_inside(cls, file: str) -> str:
        return inside(file, "the dataset")

    @property
    def rows(self) -> int:
        """Number of rows of the file."""
        return sum(self.row_groups)


class Split(_Part):
    """One split: its files in reading order, and the number of samples of each class."""

    shards: tuple[Shard, ...]
    class_counts: tuple[_Count, ...]

    @property
    def rows(self) -> int:
        """Number of samples of the split."""
        return sum(shard.rows for shard in self.shards)


class BandStatistics(_Part):
    """Per-band mean and standard deviation of the training split's pixels, in stored units."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class Manifest(_Part):
    """The contract on disk between `prepare` and everything that reads."""

    format_version: int = Field(default=FORMAT_VERSION)
    archive: str
    """Kind of the source archive."""
    task: Task
    class_names: tuple[str, ...]
    groups: tuple[ImageGroup, ...]
    splits: dict[_Name, Split]
    statistics: dict[str, BandStatistics]
    """Statistics by image group."""
    settings: dict[str, int]
    """Settings that shape rows and files: seed, row-group size, row groups per shard."""
    read_settings: dict[str, SettingValue]
    """Settings of the archive that decide the pixels and the columns (`Archive.read_settings`)."""
    source_fingerprint: str
    """Digest of the archive's index: of every sample's id, split, labels, files and metadata."""
    skipped: dict[str, int] = Field(default_factory=dict)
    """Number of the archive's samples that are not in the dataset, by reason."""

    @model_validator(mode="after")
    def _shards_are_listed_once(self) -> "Manifest":
        counts = Counter(shard.file for split in self.splits.values() for shard in split.shards)
        for file, count in counts.most_common(1):
            if count > 1:
                raise ValueError(f"shard {file!r} is listed {count} times")
        return self

    def _repr_html_(self) -> str:
        splits = "".join(
            f"<tr><th>{escape(name)}</th><td>{split.rows:,} rows</td><td>{len(split.shards):,} shards</td></tr>"
            for name, split in self.splits.items()
        )
        groups = ", ".join(f"{group.name} {group.shape} {group.dtype}" for group in self.groups)
        text = f"{self.archive}: {len(self.class_names)} classes ({self.task}), {groups}"
        return f"<p>{escape(text)}</p><table>{splits}</table>"

    @property
    def kept(self) -> list[str]:
        """Names of the user's own columns, which predictions copy."""
        return names if isinstance(names := self.read_settings.get(KEPT_SETTING), list) else []

    def split_names(self) -> str:
        """Return the names of the splits in order, for messages: `test, train`, or `no split at all`."""
        return ", ".join(sorted(self.splits)) or "no split at all"

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content, which identifies this dataset in tracked runs.

        It covers the shards' content digests, hence every label and pixel: two datasets with one fingerprint hold the
        same samples in the same order. It leaves out `read_settings`, which decide only what these digests cover.
        """
        return _digest(self.model_dump(mode="json", exclude={"read_settings"}))


def _digest(values: Mapping[str, Any]) -> str:
    """Compute SHA-256 over canonical JSON of values without the digest itself: sorted keys, no spaces, ASCII."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_json(manifest: Manifest) -> str:
    """Return the text of `dataset.json`: the manifest with its digest."""
    values = manifest.model_dump(mode="json")
    return json.dumps({**values, _DIGEST_KEY: _digest(values)}, indent=1)


def write_manifest(manifest: Manifest, dataset: Location | Path | str) -> None:
    """Write `dataset.json` atomically.

    Raises:
        OSError, RuntimeError: The storage cannot be used.
    """
    Location.at(dataset).write(FILE_NAME, manifest_json(manifest).encode())


def read_manifest(dataset: Location | Path | str) -> Manifest:
    """Read and check the manifest of a dataset.

    Raises:
        FileNotFoundError: `dataset` has no `dataset.json`.
        ValueError: The manifest is damaged, was changed after it was written, or has another format version.
        RuntimeError: The storage cannot be used.
    """
    folder = Location.at(dataset)
    path = f"{folder}/{FILE_NAME}"
    try:
        data = folder.read(FILE_NAME)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise FileNotFoundError(
            f"{folder} is not a finished dataset: it has no {FILE_NAME}; make it with `groundswell prepare`, "
            "or point dataset.path at one"
        ) from None
    try:
        values = parse_json(data)
        version = values["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: no JSON object with a format_version ({error!r})") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {str(version)[:20]}, this program reads {FORMAT_VERSION}: remove the dataset "
            "and run `groundswell prepare` again"
        )
    stated, found = values.pop(_DIGEST_KEY, None), _digest(values)
    if stated != found:
        raise ValueError(
            f"{path} was changed after it was written: it states the digest {stated}, its content has {found}; restore "
            "the file, or remove the dataset and run `groundswell prepare` again"
        )
    try:
        return Manifest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:300]}") from None
