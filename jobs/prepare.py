"""`groundswell prepare`: a raw archive becomes a dataset."""

import argparse
import time

from conf.schema import RunConfig
from jobs import cli
from jobs.command import read_config, say
from jobs.display import PrepareDisplay
from jobs.result import Result
from jobs.session import spark_session
from pipelines.archives.archive import Archive
from pipelines.archives.table import open_archive
from pipelines.dataset.manifest import Manifest
from pipelines.dataset.writer import prepare_dataset
from pipelines.locations import absolute_location


def prepare(config: RunConfig) -> Manifest:
    """Write the configured archive as the configured dataset."""
    archive = configured_archive(config)
    with spark_session("groundswell prepare", config.launch.master) as spark:
        spark.sparkContext.setJobDescription(f"groundswell prepare: {config.dataset.path}")
        display = PrepareDisplay()
        try:
            return prepare_dataset(
                spark,
                archive,
                config.dataset.path,
                row_group_mib=config.prepare.row_group_mib,
                row_groups_per_shard=config.prepare.row_groups_per_shard,
                seed=config.prepare.seed,
                max_rejected_fraction=config.prepare.max_rejected_fraction,
                overwrite=config.prepare.overwrite,
                restart=config.prepare.restart,
                verify=config.prepare.verify,
                say=say,
                progress=display,
            )
        finally:
            display.close()


def configured_archive(config: RunConfig) -> Archive:
    """The archive of the configuration; its folders are absolute paths or URLs, for the executors.

    Raises:
        ValueError: There is none, or a path is misspelt (`locations.absolute_location`); names the setting.
    """
    if config.archive is None:
        raise ValueError("archive is missing: set archive=bigearthnet_v2 and archive.root, or see `groundswell list`")
    settings = config.archive.model_dump(exclude={"kind"})
    for name in ("root", "splits"):
        if settings.get(name) is not None:
            try:
                settings[name] = absolute_location(settings[name])
            except ValueError as error:
                raise ValueError(f"archive.{name}: {error}") from None
    return open_archive(config.archive.kind, **settings)


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Prepare as the command line says."""
    config = read_config(arguments)
    result.dataset = config.dataset.path
    started = time.perf_counter()
    # The same command continues, but to discard once is enough.
    result.continue_with = ["--set", "prepare.restart=false"] if config.prepare.restart else []
    manifest = prepare(config)
    result.continue_with = None
    splits = ", ".join(f"{split} {info.rows}" for split, info in manifest.splits.items())
    say(f"{config.dataset.path}: {splits} samples, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    cli.main("prepare")
