"""From an archive to a dataset, as one Spark job; nothing that looks whole before it is."""

import functools
import math
import operator
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from pipelines.archives.archive import Archive, BadRecordError
from pipelines.dataset.manifest import FILE_NAME, Manifest, Split, read_manifest, write_manifest
from pipelines.dataset.petastorm_metadata import write_petastorm_metadata
from pipelines.dataset.rows import fixed_fields
from pipelines.dataset.shard import ShardPlan, WrittenShard, write_shard
from pipelines.dataset.statistics import BandSums

TRAINING_SPLIT = "train"


def prepare_dataset(
    spark: SparkSession,
    archive: Archive,
    dataset: Path,
    *,
    row_group_mib: int = 40,
    row_groups_per_shard: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Write `archive` as a dataset of Petastorm-format Parquet, one directory per split.

    Shards are written under `<dataset>.incomplete` and the folder is renamed at the end, with `dataset.json` in it:
    whatever stops the job, `dataset` is a whole dataset or does not exist. A dataset that the same archive and
    settings made is left as it is.

    Args:
        spark: Session whose executors see both paths.
        archive: What to read.
        dataset: Folder to make.
        row_group_mib: Uncompressed MiB per row group.
        row_groups_per_shard: Row groups per Parquet file.
        seed: Of the one shuffle of rows within their split.
        say: Told what goes on, a line at a time.

    Raises:
        FileNotFoundError: The archive is missing.
        ValueError: It is empty or malformed, has no training split, or `dataset` exists and is something else.
        BadRecordError: A sample cannot be read; names the file.
    """
    description = archive.description
    settings = {"row_group_mib": row_group_mib, "row_groups_per_shard": row_groups_per_shard, "seed": seed}
    fingerprint = archive.fingerprint()
    if dataset.exists():
        existing = _existing(dataset, fingerprint, settings)
        say(f"{dataset} is finished already; left as it is")
        return existing
    index = archive.index()
    plans = plan_shards(archive, index, **settings)
    if TRAINING_SPLIT not in plans:
        raise ValueError(f"the archive has no samples of the split {TRAINING_SPLIT!r}: {', '.join(sorted(plans))}")
    say(f"writing {len(index)} samples of {len(plans)} splits as {sum(map(len, plans.values()))} shards")

    staging = dataset.with_name(dataset.name + ".incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        written = _write_splits(spark, archive, staging, plans, say)
        manifest = Manifest(
            archive=description.kind,
            task=description.task,
            class_names=description.class_names,
            groups=description.groups,
            splits={split: _split(shards) for split, shards in written.items()},
            statistics={group: sums.statistics() for group, sums in _merge_sums(written[TRAINING_SPLIT]).items()},
            settings=settings,
            source_fingerprint=fingerprint,
        )
        write_manifest(manifest, staging)
        staging.rename(dataset)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def plan_shards(
    archive: Archive, index: pa.Table, *, row_group_mib: int, row_groups_per_shard: int, seed: int
) -> dict[str, list[ShardPlan]]:
    """Shuffle each split once and cut it into shards whose sizes differ by one row at most."""
    description = archive.description
    fields = fixed_fields(description.groups, len(description.class_names)).values()
    row_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields)
    rows_per_group = max(1, row_group_mib * 2**20 // row_bytes)
    plans: dict[str, list[ShardPlan]] = {}
    for number, split in enumerate(sorted(index["split"].unique().to_pylist())):
        rows = np.flatnonzero(pc.equal(index["split"], split).to_numpy(zero_copy_only=False))
        rows = np.random.default_rng([seed, number]).permutation(rows)
        shard_count = math.ceil(len(rows) / (rows_per_group * row_groups_per_shard))
        shuffled = index.take(pa.array(rows)).combine_chunks()
        plans[split] = []
        for shard, part in enumerate(np.array_split(np.arange(len(rows)), shard_count)):
            columns = shuffled.slice(int(part[0]), len(part)).to_pydict()
            plans[split].append(
                ShardPlan(
                    file=f"{split}/part-{shard:05d}.parquet",
                    ids=columns["id"],
                    labels=columns["labels"],
                    paths=columns["paths"],
                    rows_per_group=rows_per_group,
                )
            )
    return plans


def _existing(dataset: Path, fingerprint: str, settings: dict[str, int]) -> Manifest:
    if not (dataset / FILE_NAME).is_file():
        raise ValueError(f"{dataset} exists and is not a dataset: choose another dataset.path, or remove the folder")
    manifest = read_manifest(dataset)
    differences = [
        f"{name} {manifest.settings.get(name)} there, {value} asked for"
        for name, value in settings.items()
        if manifest.settings.get(name) != value
    ]
    if manifest.source_fingerprint != fingerprint:
        differences.append("the archive's metadata is another")
    if differences:
        raise ValueError(
            f"{dataset} holds another dataset ({'; '.join(differences)}): choose another dataset.path, or remove it"
        )
    return manifest


def _write_splits(
    spark: SparkSession,
    archive: Archive,
    dataset: Path,
    plans: dict[str, list[ShardPlan]],
    say: Callable[[str], None],
) -> dict[str, list[WrittenShard]]:
    results = iter(_run(spark, archive, dataset, [plan for shards in plans.values() for plan in shards]))
    written = {split: [next(results) for _ in shards] for split, shards in plans.items()}
    description = archive.description
    for split, shards in written.items():
        write_petastorm_metadata(
            dataset / split,
            [result.shard for result in shards],
            description.groups,
            len(description.class_names),
        )
        say(f"{split}: {sum(result.shard.rows for result in shards)} samples")
    return written


def _run(spark: SparkSession, archive: Archive, dataset: Path, plans: list[ShardPlan]) -> list[WrittenShard]:
    # A bad record comes back as a value: raised in the task, Spark would read the same file four times over
    # and bury the message in its own.
    def task(shards: Iterable[ShardPlan]) -> Iterator[WrittenShard | BadRecordError]:
        for shard in shards:
            try:
                yield write_shard(shard, archive, dataset)
            except BadRecordError as error:
                yield error

    results: list[Any] = spark.sparkContext.parallelize(plans, len(plans)).mapPartitions(task).collect()
    for result in results:
        if isinstance(result, BadRecordError):
            raise result
    return results


def _split(shards: list[WrittenShard]) -> Split:
    return Split(
        shards=tuple(result.shard for result in shards),
        class_counts=tuple(np.sum([result.class_counts for result in shards], axis=0).tolist()),
    )


def _merge_sums(shards: list[WrittenShard]) -> dict[str, BandSums]:
    return {
        group: functools.reduce(operator.add, (result.band_sums[group] for result in shards))
        for group in shards[0].band_sums
    }
