"""`groundswell benchmark-reader`: how fast this machine's storage feeds training."""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from jobs.shell import cli
from jobs.shell.command import Result, say
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.dataset.read.buffers import BufferPool
from pipelines.dataset.read.cache import default_cache_folder
from pipelines.dataset.read.reader import ReaderSettings, SplitReader, Verify, training_batches
from pipelines.storage.locations import absolute_location, absolute_path

_CHECKSUMS: dict[Verify, str] = {
    "first_epoch": "checksums: computed in the first epoch only",
    "always": "checksums: computed in every epoch",
    "never": "checksums: never computed",
}


@dataclass(frozen=True)
class Reading:
    """The measurements of one epoch."""

    rows: int
    seconds: float
    waited: float
    """Seconds in which the consumer waited for rows."""
    row_bytes: int

    def __str__(self) -> str:
        """Return the measurements as a line."""
        rate = self.rows / self.seconds
        return (
            f"{rate:,.0f} rows/s, {rate * self.row_bytes / 1e6:,.0f} MB/s, waited {self.waited / self.seconds:.1%} of "
            f"{self.seconds:.1f} s"
        )


def read_epoch(
    reader: SplitReader, pool: BufferPool, *, epoch: int, batch_size: int, rows_per_second: float | None = None
) -> Reading:
    """Read one shuffled epoch as training does, at full speed or at the speed of a training step.

    Args:
        reader: The split.
        pool: Memory that every epoch reuses.
        epoch: Number of the epoch, which decides the order.
        batch_size: Rows of a batch.
        rows_per_second: Speed of the consumer; None: no limit.
    """
    pause = batch_size / rows_per_second if rows_per_second else 0.0
    batches = training_batches(reader, seed=0, epoch=epoch, global_batch_size=batch_size, pool=pool)
    rows, waited = 0, 0.0
    started = asked = time.perf_counter()
    for batch in batches:
        waited += time.perf_counter() - asked
        rows += len(batch.rows)
        del batch
        if pause:
            time.sleep(pause)
        asked = time.perf_counter()
    return Reading(rows, time.perf_counter() - started, waited, reader.row_bytes)


def drop_from_memory(folder: Path) -> None:
    """Remove the files of a folder from the operating system's cache, so that the next epoch reads from disk."""
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Measure as the command line says."""
    result.dataset = arguments.dataset
    settings = ReaderSettings(
        threads=arguments.threads,
        cache_folder=Path(absolute_path("--cache-folder", arguments.cache_folder))
        if arguments.cache_folder
        else default_cache_folder(),
        cache_limit_bytes=int(arguments.cache_limit_gib * 2**30),
        verify=arguments.verify,
    )
    started = time.perf_counter()
    reader = SplitReader(arguments.dataset, arguments.split, settings)
    if not steps_per_epoch(len(reader), arguments.batch_size):
        raise ValueError(
            f"{arguments.dataset} has {len(reader)} rows of {arguments.split!r}, fewer than --batch-size "
            f"{arguments.batch_size}"
        )
    say(
        f"{arguments.dataset}, {arguments.split}: {len(reader):,} rows of {reader.row_bytes:,} bytes, opened in "
        f"{time.perf_counter() - started:.2f} s",
        _CHECKSUMS[arguments.verify],
    )
    if reader.window_rows is not None:
        say(f"larger than the cache: shuffled among {reader.window_rows:,} rows at a time")
    epochs: list[tuple[str, float | None]] = [("from memory" if number else "first", None) for number in range(3)]
    epochs.append((f"training at {arguments.images_per_second:,.0f} images/s", arguments.images_per_second))
    folder = Path(absolute_location(arguments.dataset), arguments.split)
    if folder.is_dir():
        drop_from_memory(folder)
        epochs[0] = ("from disk", None)
    pool = reader.pool(arguments.batch_size)
    for number, (name, rate) in enumerate(epochs):
        reading = read_epoch(reader, pool, epoch=number, batch_size=arguments.batch_size, rows_per_second=rate)
        say(f"{name}: {reading}")
        result.metrics[f"{name}, rows/s"] = reading.rows / reading.seconds


if __name__ == "__main__":
    cli.main("benchmark-reader")
