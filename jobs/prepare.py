"""`groundswell prepare`: a raw archive becomes a dataset."""

import argparse
import sys
import time
from pathlib import Path

from conf.schema import RunConfig
from jobs.command import config_arguments, read_config, run, say
from jobs.session import spark_session
from pipelines.archives.table import open_archive
from pipelines.dataset.manifest import Manifest
from pipelines.dataset.writer import prepare_dataset


def prepare(config: RunConfig) -> Manifest:
    """Write the configured archive as the configured dataset."""
    archive = open_archive(config.archive.kind, str(Path(config.archive.root).absolute()))
    with spark_session("groundswell prepare", config.launch.master) as spark:
        return prepare_dataset(
            spark,
            archive,
            Path(config.dataset.path).absolute(),
            row_group_mib=config.prepare.row_group_mib,
            row_groups_per_shard=config.prepare.row_groups_per_shard,
            seed=config.prepare.seed,
            say=say,
        )


def main(argv: list[str] | None = None) -> int:
    """Console entry."""
    parser = argparse.ArgumentParser(prog="groundswell prepare", description=__doc__)
    config_arguments(parser)
    arguments = parser.parse_args(argv)

    def body() -> int:
        config = read_config(arguments)
        started = time.perf_counter()
        manifest = prepare(config)
        splits = ", ".join(f"{split} {info.rows}" for split, info in manifest.splits.items())
        say(f"{config.dataset.path}: {splits} samples, {time.perf_counter() - started:.0f} s")
        return 0

    return run("prepare", body)


if __name__ == "__main__":
    sys.exit(main())
