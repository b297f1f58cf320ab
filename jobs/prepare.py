"""`groundswell prepare`: a raw archive becomes a dataset."""

import argparse
import sys
import time
from typing import Any

from tqdm.auto import tqdm

from conf.schema import RunConfig
from jobs.command import config_arguments, interactive, read_config, run, say
from jobs.session import spark_session
from pipelines.archives.archive import Archive
from pipelines.archives.table import open_archive
from pipelines.dataset.manifest import Manifest
from pipelines.dataset.writer import PrepareProgress, prepare_dataset
from pipelines.locations import absolute_location

_SECONDS_BETWEEN_LINES = 15.0


def prepare(config: RunConfig) -> Manifest:
    """Write the configured archive as the configured dataset."""
    archive = configured_archive(config)
    with spark_session("groundswell prepare", config.launch.master) as spark:
        display = _Display()
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
                say=say,
                progress=display,
            )
        finally:
            display.close()


def configured_archive(config: RunConfig) -> Archive:
    """The archive of the configuration; its folders are absolute paths or URLs, for the executors.

    Raises:
        ValueError: A path is misspelt (`locations.absolute_location`); names the setting.
    """
    settings = config.archive.model_dump(exclude={"kind"})
    for name in ("root", "splits"):
        if settings.get(name) is not None:
            try:
                settings[name] = absolute_location(settings[name])
            except ValueError as error:
                raise ValueError(f"archive.{name}: {error}") from None
    return open_archive(config.archive.kind, **settings)


class _Display:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._started = self._last_line = time.monotonic()

    def __call__(self, progress: PrepareProgress) -> None:
        if interactive():
            if self._bar is None:
                self._bar = tqdm(total=progress.total, unit="sample", leave=False)
            self._bar.set_postfix_str(f"{progress.rejected} rejected")
            self._bar.update(progress.done - self._bar.n)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            rate = progress.done / (time.monotonic() - self._started)
            say(f"{progress.done}/{progress.total} samples, {rate:.0f}/s, {progress.rejected} rejected")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


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
