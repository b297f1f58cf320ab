"""The settings of the prepared dataset: its location, and how it is written and read."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


class DatasetConfig(Section):
    """The prepared dataset, which `prepare` writes and every other verb reads."""

    path: str = ""
    """Folder of the dataset: a path, or a URL that fsspec supports (`s3://bucket/folder`). Empty: no dataset; `score`
    does not need one."""


class PrepareConfig(Section):
    """The layout of the dataset on disk."""

    row_group_mib: int = Field(default=40, gt=0, le=1024)
    """Uncompressed size of one Parquet row group, in MiB."""
    row_groups_per_shard: int = Field(default=4, gt=0)
    """Number of row groups in one Parquet file."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the shuffle of each split's rows, which happens once."""
    max_rejected_fraction: float = Field(default=0.01, ge=0, le=1)
    """Largest fraction of rejected samples; the job fails if more are rejected."""
    overwrite: bool = False
    """Whether to replace an existing dataset, also one from another archive or other settings."""
    restart: bool = False
    """Whether to discard the unfinished work of an earlier run; a finished dataset is not changed."""
    verify: bool = False
    """Whether to read the finished shards, and to rewrite shards with damaged rows."""


class ReaderConfig(Section):
    """The settings with which workers read the dataset."""

    name: Literal["groundswell", "petastorm"] = "groundswell"
    """Reader of the dataset. Petastorm's own is for comparison: it is slower, and its order depends on the number of
    workers."""
    threads: int = Field(default=2, gt=0, le=64)
    """Number of threads that gather batches."""
    batches_in_flight: int = Field(default=3, gt=0, le=64)
    """Number of batches that are gathered before the training step needs them."""
    cache_folder: str | None = Field(default=None, min_length=1)
    """Local folder that caches remote or compressed datasets; null: in the temporary folder (TMPDIR)."""
    cache_limit_gib: float = Field(default=100.0, gt=0)
    """Size of the cache; a larger dataset is read and shuffled in windows that fit into the cache."""
    verify: Literal["first_epoch", "always", "never"] = "first_epoch"
    """When workers verify a row's checksum: when they first read the row, always, or never. Rows that come through the
    cache are verified at the first read even with `never`."""
