"""`groundswell find-batch`: the largest batch per worker that fits the memory of a configuration's workers."""

import argparse

from conf.schema import RunConfig
from conf.sections.schedules import ConstantConfig, NoWarmupConfig
from jobs.shell import cli
from jobs.shell.command import Result, read_config, say
from jobs.shell.paths import with_absolute_paths
from jobs.shell.ranks import barrier_runner, check_slots
from jobs.shell.session import spark_session
from pipelines.sample import TRAINING_SPLIT
from pipelines.training import entry
from pipelines.training.driver.checks import check_dataset
from pipelines.training.finders.batches import FRACTION, BatchSearch, Trial, batch_multiple
from pipelines.training.ranks.events import BatchTried, Event

_MIB = 1 << 20


def find_batch(config: RunConfig, at_most: int | None, result: Result) -> BatchSearch:
    """Try rising batch sizes on the configured workers.

    Args:
        config: Dataset, model, recipe and workers; its batch size is not used.
        at_most: Largest batch to try; None: each worker's share of the training split.
        result: Filled in while the job runs.
    """
    is_tried = config.training.mode.declaration.is_tried_by_find_batch
    config = with_absolute_paths(_with_smallest_batch(config if is_tried else config.with_synchronous_mode()))
    result.dataset = config.dataset.path
    manifest = check_dataset(config)
    share = manifest.splits[TRAINING_SPLIT].rows // config.launch.num_workers
    largest, multiple = min(share, at_most or share), batch_multiple(config.training)
    if largest < multiple:
        raise ValueError(f"--at-most {at_most}: training.mixup mixes samples in pairs, so that a batch has at least 2")
    with spark_session(
        "groundswell find-batch", config.launch.master, gpus_per_worker=config.launch.gpus_per_worker
    ) as spark:
        check_slots(spark, config.launch)
        runner = barrier_runner(spark, config.launch, description="groundswell find-batch", on_event=_show)
        search: BatchSearch = runner.run(entry.search_batch, config, largest // multiple * multiple)
    return search


def lines_of(search: BatchSearch) -> list[str]:
    """Return estimate and trials as lines of text."""
    allowed = FRACTION * search.limit.bytes
    estimated = min(search.needs.fitting(allowed), search.largest_allowed)
    return [
        f"limit     {allowed / _MIB:,.0f} MiB per worker: {FRACTION:.0%} of its part of {search.limit.source}",
        f"estimate  {search.needs.describe()}: up to {estimated:,} samples",
        *(f"trial     {_line(trial, search)}" for trial in search.trials),
    ]


def _line(trial: Trial, search: BatchSearch) -> str:
    if trial.out_of_memory:
        return f"{trial.batch_size:>6,} samples: out of memory"
    verdict = "fits" if trial.fits(search.limit) else "too large"
    return f"{trial.batch_size:>6,} samples: {trial.peak / _MIB:,.0f} MiB, {verdict}"


def _with_smallest_batch(config: RunConfig) -> RunConfig:
    """Return the configuration with the smallest batch, a constant rate and full images, which no check refuses.

    The steps still accumulate.
    """
    size = batch_multiple(config.training)
    accumulates = config.training.global_batch_size is not None
    return config.with_values(
        training={
            "batch_size_per_worker": size,
            "global_batch_size": config.launch.num_workers * size if accumulates else None,
        },
        schedule={"warmup": NoWarmupConfig(), "decay": ConstantConfig()},
        input={"resolution_schedule": []},
    )


def _show(event: Event) -> None:
    if isinstance(event, BatchTried):
        say(f"trying a batch of {event.batch_size:,} on every worker")


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Search as the command line says.

    Raises:
        RuntimeError: Even the smallest batch does not fit.
    """
    search = find_batch(read_config(arguments), arguments.at_most, result)
    say(*lines_of(search))
    if search.found is None:
        raise RuntimeError(
            f"a batch of {search.trials[0].batch_size} does not fit {FRACTION:.0%} of {search.limit.source}: give "
            "workers more memory, choose a smaller model, or have fewer workers on a host"
        )
    say(f"largest batch that fits: --set training.batch_size_per_worker={search.found}")
    result.metrics = {"batch_size_per_worker": search.found}


if __name__ == "__main__":
    cli.main("find-batch")
