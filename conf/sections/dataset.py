"""The prepared dataset: where it is, how it is written and how it is read."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


class DatasetConfig(Section):
    """The prepared dataset, which `prepare` writes and every other verb reads."""

    path: str = ""
    """Folder of the dataset: a path, or a URL that fsspec knows (`s3://bucket/folder`); empty: not named, which is
    enough for `score`."""


class PrepareConfig(Section):
    """How the dataset is laid out on disk."""

    row_group_mib: int = Field(default=40, gt=0, le=1024)
    """Uncompressed size of one Parquet row group, in MiB."""
    row_groups_per_shard: int = Field(default=4, gt=0)
    """Number of row groups in one Parquet file."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed by which the rows of a split are shuffled, once."""
    max_rejected_fraction: float = Field(default=0.01, ge=0, le=1)
    """The job fails when a larger fraction of the samples is rejected."""
    overwrite: bool = False
    """Whether to replace an existing dataset, also one that another archive or other settings made."""
    restart: bool = False
    """Whether to discard the unfinished work of an earlier run; a finished dataset is left as it is."""
    verify: bool = False
    """Whether to read the shards that are finished already, and to write again those with damaged rows."""


class ReaderConfig(Section):
    """How workers read the dataset."""

    name: Literal["groundswell", "petastorm"] = "groundswell"
    """Petastorm's own reader is for comparison: it is slower, and its order depends on the number of workers."""
    threads: int = Field(default=2, gt=0, le=64)
    """Number of threads that gather batches."""
    batches_in_flight: int = Field(default=3, gt=0, le=64)
    """Number of batches that are gathered ahead of the training step."""
    cache_folder: str | None = Field(default=None, min_length=1)
    """Local folder that caches remote or compressed datasets; null: in the temporary folder (TMPDIR)."""
    cache_limit_gib: float = Field(default=100.0, gt=0)
    """Size of that cache; a larger dataset is read, and shuffled, in windows that fit."""
    verify: Literal["first_epoch", "always", "never"] = "first_epoch"
    """When workers compute a row's checksum: when they read it for the first time, always, or never. Rows that come
    through the cache are checked when they are read for the first time also with `never`."""
