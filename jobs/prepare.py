"""`groundswell prepare`: converts a raw archive into a dataset."""

import argparse
import time
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from conf.schema import RunConfig
from conf.sections.archives import TableConfig
from jobs.shell import cli
from jobs.shell.command import Result, read_config, say
from jobs.shell.display import SamplesDisplay
from jobs.shell.paths import dataset_location
from jobs.shell.session import spark_session
from pipelines.archives.archive import Archive
from pipelines.archives.images.frame import write_frame
from pipelines.archives.images.image_table import ImageTable
from pipelines.archives.table import open_archive
from pipelines.dataset.format.files import check_apart
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.prepare.survey import find_finished
from pipelines.dataset.prepare.writer import checked_index, prepare_dataset
from pipelines.storage.folder import Location
from pipelines.storage.locations import absolute_location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def prepare(config: RunConfig, table: "DataFrame | None" = None) -> Manifest:
    """Write the configured archive as the configured dataset.

    Args:
        config: Archive, dataset and its layout.
        table: With `archive.kind=table`, a DataFrame. Its columns of images, labels and splits, its key, and the
            columns to keep are first written as Parquet files into `archive.root`, a new folder. None: the archive
            exists, as it does when a preparation continues.

    Raises:
        ValueError: The archive cannot be used; or a DataFrame is given for another kind of archive, lacks the columns,
            has a key in several rows, or its folder is not empty.
    """
    archive, dataset, chosen = configured_archive(config), dataset_location(config), config.archive
    assert chosen is not None, "it has an archive"
    if table is not None and not isinstance(chosen, TableConfig):
        raise ValueError(f"table is for archive.kind=table, and archive.kind is {chosen.kind}")
    index = checked_index(archive, dataset) if table is None else None  # before Spark, which takes seconds to start
    with spark_session("groundswell prepare", config.launch.master, runs_on_connect=True) as spark:
        if table is not None:
            _write_table(table, config, archive, dataset)
        with closing(SamplesDisplay()) as display:
            return prepare_dataset(
                spark,
                archive,
                dataset,
                row_group_mib=config.prepare.row_group_mib,
                row_groups_per_shard=config.prepare.row_groups_per_shard,
                seed=config.prepare.seed,
                max_rejected_fraction=config.prepare.max_rejected_fraction,
                overwrite=config.prepare.overwrite,
                restart=config.prepare.restart,
                verify=config.prepare.verify,
                index=index,
                say=say,
                progress=display,
            )


def _write_table(table: "DataFrame", config: RunConfig, archive: Archive, dataset: str) -> None:
    assert isinstance(config.archive, TableConfig)
    assert isinstance(archive, ImageTable)
    root = archive.root
    target = Location.at(dataset)
    target.check()
    check_apart(root, target)
    find_finished(target)  # refuses a folder with other content before hours of writing
    chosen = config.archive
    columns = [chosen.image, chosen.label, chosen.split, chosen.id, *chosen.keep]
    names = [name for name in dict.fromkeys(columns) if name is not None]
    check = partial(archive.check_columns, "the DataFrame")
    rows = write_frame(table, Location.at(root), names, check, key=chosen.id)
    say(f"{root}: {rows} rows of the DataFrame")


def configured_archive(config: RunConfig) -> Archive:
    """Return the configured archive; its folders are absolute paths or URLs, for the executors.

    Raises:
        ValueError: There is no archive, or a path is misspelt (`locations.absolute_location`); the message names the
            setting.
    """
    if config.archive is None:
        raise ValueError("archive is missing: set archive=bigearthnet_v2 and archive.root, or see `groundswell list`")
    settings = config.archive.model_dump(exclude={"kind"})
    if settings.get("root") == "":
        raise ValueError("archive.root is not set: name the folder or URL of the archive")
    folders = {name: settings[name] for name in ("root", "splits") if settings.get(name) is not None}
    settings |= {name: absolute_location(folder, f"archive.{name}: ") for name, folder in folders.items()}
    return open_archive(config.archive.kind, **settings)


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Prepare as the command line says."""
    config = read_config(arguments)
    result.dataset = config.dataset.path
    started = time.perf_counter()
    # The same command continues the work, but must not discard it again.
    result.continue_with = ["--set", "prepare.restart=false"] if config.prepare.restart else []
    result.save()
    manifest = prepare(config)
    result.continue_with = None
    splits = ", ".join(f"{split} {info.rows}" for split, info in manifest.splits.items())
    say(f"{config.dataset.path}: {splits} samples, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    cli.main("prepare")
