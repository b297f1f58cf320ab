"""The configured reader that feeds the training."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.schema import RunConfig
from conf.sections.dataset import ReaderConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.dataset.read.cache import default_cache_folder
from pipelines.dataset.read.petastorm_reader import petastorm_batches
from pipelines.dataset.read.reader import Batch, ReaderSettings, SplitReader, training_batches
from pipelines.sample import TRAINING_SPLIT

_log = logging.getLogger(__name__)


def reader_settings(config: ReaderConfig) -> ReaderSettings:
    """Return the configured settings in the reader's own units."""
    return ReaderSettings(
        threads=config.threads,
        batches_in_flight=config.batches_in_flight,
        cache_folder=Path(config.cache_folder) if config.cache_folder else default_cache_folder(),
        cache_limit_bytes=int(config.cache_limit_gib * 2**30),
        verify=config.verify,
    )


@dataclass(frozen=True)
class TrainingInput:
    """The batches of this rank from the training split, with the configured number of micro-batches per step."""

    batches_of: Callable[[int, int], Iterator[Batch]]
    """Returns the batches of an epoch, from a given step on."""
    order: str
    """The factors that decide the order of samples in addition to seed and dataset; see `order_of`."""
    resumes_within_epoch: bool
    """Whether `batches_of` can start at a step other than the first."""


def order_of(config: ReaderConfig, window_rows: int | None) -> str:
    """Return a text with the factors that decide the order of samples in addition to seed and dataset.

    Args:
        config: The reader's section.
        window_rows: Value of `SplitReader.window_rows` for the training split, with the reader of this project.
    """
    if config.name == "petastorm":
        return "Petastorm's reader"
    window = "any row" if window_rows is None else f"windows of {window_rows} rows"
    return f"groundswell's reader, {window}"


def make_input(config: RunConfig, manifest: Manifest, *, rank: int, size: int, micro_batches: int = 1) -> TrainingInput:
    """Open the configured reader on the training split.

    Args:
        config: The whole configuration.
        manifest: Manifest of the dataset.
        rank: Number of this rank. Ranks that share one copy of the model take the same samples.
        size: Number of ranks.
        micro_batches: Number of a rank's batches per step.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: See `SplitReader`.
    """
    in_copy = config.training.mode.declaration.ranks_per_copy
    rank, size = rank // in_copy, size // in_copy
    seed, global_batch_size = config.training.seed, config.global_batch_size
    batch_size = global_batch_size // (size * micro_batches)
    if config.reader.name == "petastorm":
        steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, global_batch_size)

        def of_petastorm(epoch: int, start_step: int) -> Iterator[Batch]:
            if start_step:
                raise ValueError("Petastorm's reader cannot resume within an epoch: set reader.name=groundswell")
            return petastorm_batches(
                config.dataset.path,
                TRAINING_SPLIT,
                manifest,
                seed=seed,
                epoch=epoch,
                batch_size=batch_size,
                steps=steps * micro_batches,
                threads=config.reader.threads,
                rank=rank,
                size=size,
            )

        return TrainingInput(of_petastorm, order_of(config.reader, None), resumes_within_epoch=False)

    reader = SplitReader(config.dataset.path, TRAINING_SPLIT, reader_settings(config.reader))
    pool = reader.pool(batch_size)
    if reader.window_rows is not None and rank == 0:
        _log.warning(
            "%s is larger than reader.cache_limit_gib=%g: rows are shuffled among %d at a time, %.0f %% of the split",
            config.dataset.path,
            config.reader.cache_limit_gib,
            reader.window_rows,
            100 * reader.window_rows / len(reader),
        )

    def of_ours(epoch: int, start_step: int) -> Iterator[Batch]:
        return training_batches(
            reader,
            seed=seed,
            epoch=epoch,
            global_batch_size=global_batch_size,
            rank=rank,
            size=size,
            start_step=start_step,
            micro_batches=micro_batches,
            pool=pool,
        )

    return TrainingInput(of_ours, order_of(config.reader, reader.window_rows), resumes_within_epoch=True)
