"""The configured launcher, the same for every verb that runs ranks, and the hint for a rank that the kernel killed."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from conf.schema import RunConfig
from conf.sections.launch import LaunchConfig
from jobs.shell.command import say
from pipelines.launch.driver.failure import RankLostError
from pipelines.launch.driver.preflight import check_cluster, unused_gpus
from pipelines.launch.runner import Attempt, BarrierRunner, LogToDriver
from pipelines.launch.wire.messages import JsonObject
from pipelines.machine.console import counted
from pipelines.tracking.store.store import worker_environment
from pipelines.training.finders.batches import smaller_batch
from pipelines.training.ranks.events import Event, MemoryNeeded, event_of


def check_slots(spark: SparkSession, config: LaunchConfig) -> None:
    """Refuse ranks for which Spark has no place, and report GPUs that the ranks do not use.

    Raises:
        RuntimeError: See `check_cluster`.
    """
    check_cluster(spark, config.num_workers, config.gpus_per_worker)
    unused = unused_gpus(spark, config.gpus_per_worker)
    if unused:
        say(unused)


def barrier_runner(
    spark: SparkSession,
    config: LaunchConfig,
    *,
    description: str,
    allowed_sizes: Sequence[int] = (),
    spares: bool = False,
    log_to_driver: LogToDriver = "callback",
    log_folder: Path | None = None,
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> BarrierRunner:
    """Make the launcher of one job; its workers write to the driver's MLflow store.

    Args:
        spark: A session.
        config: Number and resources of the ranks, and the recovery after a death.
        description: Verb and run name, the job's description in Spark's page.
        allowed_sizes: Numbers of ranks that a further attempt may have, used with `launch.allow_fewer_workers`.
        spares: Whether each worker keeps a spare process ready.
        log_to_driver: Which lines of the ranks are shown.
        log_folder: Folder for the complete log of each rank.
        on_attempt: Called before each attempt.
        on_event: Called with each event of rank 0.
    """

    def tell(attempt: Attempt) -> None:
        again = f"attempt {attempt.number} after: {attempt.after}; " if attempt.number > 1 else ""
        say(f"{again}starting {counted(attempt.num_workers, 'worker')}")
        on_attempt(attempt)

    def on_report(fields: JsonObject) -> None:
        event = event_of(fields)
        if event is not None:
            on_event(event)

    return BarrierRunner(
        spark,
        config.num_workers,
        gpus_per_worker=config.gpus_per_worker,
        threads_per_worker=config.threads_per_worker,
        start_timeout=config.start_timeout_seconds,
        exchange_timeout=config.exchange_timeout_seconds,
        hang_timeout=config.hang_timeout_seconds,
        stop_grace=config.stop_grace_seconds,
        retries=config.retries,
        allowed_sizes=allowed_sizes if config.allow_fewer_workers else (),
        spares=spares,
        accept_unencrypted=config.accept_unencrypted,
        env=worker_environment(),
        description=description,
        log_to_driver=log_to_driver,
        log_folder=log_folder,
        on_attempt=tell,
        on_ready=lambda attempt: say(f"{counted(attempt.num_workers, 'worker')} ready"),
        on_report=on_report,
    )


class ShortageHint:
    """Records the memory that a rank needs: the kernel kills ranks if a host runs out of memory."""

    def __init__(self, config: RunConfig) -> None:
        """Start without figures: rank 0 sends them when it has a model."""
        self._config = config
        self._needed: MemoryNeeded | None = None

    def take(self, event: Event) -> None:
        """Take one event of the training or search."""
        if isinstance(event, MemoryNeeded):
            self._needed = event

    def say(self, error: BaseException) -> None:
        """Say what to change, if the kernel's kill ended the job."""
        if not isinstance(error, RankLostError) or error.root.exit_code != -signal.SIGKILL:
            return
        begin = f"rank {error.root.rank} was killed; if memory was short"
        if self._needed is None:
            say(f"{begin}, it was so before there was a model: choose a smaller model or more memory")
            return
        needs, limit = self._needed.needs, self._needed.limit
        where = "" if limit is None else f" ({limit.source})"
        say(f"{begin}{where}: {smaller_batch(self._config.training, needs, limit)}")
