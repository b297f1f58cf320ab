"""The facts that the driver writes to the tracked run of a training: its settings, attempts, logs and end."""

import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.notation import text_of
from conf.schema import RunConfig
from pipelines.dataset.format.manifest import Manifest, manifest_json
from pipelines.launch.driver.failure import RankLostError, WorkerError
from pipelines.launch.runner import Attempt
from pipelines.storage.folder import Location, StorageError
from pipelines.storage.locations import redacted
from pipelines.storage.whole_files import remove_if_empty
from pipelines.tracking.journal.delivery import News, OnNews
from pipelines.tracking.journal.guard import guarded
from pipelines.tracking.journal.journal import driver_journal, journals, rank_journal
from pipelines.tracking.journal.local_run import (
    CONFIG_FILE,
    FILE_NAME,
    Description,
    LocalRun,
    read_local_run,
    update_local_run,
)
from pipelines.tracking.journal.sync import DRIVER_DIED
from pipelines.tracking.journal.writer import RunWriter, now
from pipelines.tracking.store import queries, revision, runs
from pipelines.tracking.store.environment import host_facts, packages
from pipelines.tracking.store.recorded import DIVERGED_TAG
from pipelines.tracking.store.runs import Status
from pipelines.tracking.store.store import TrackedRun, TrackingError
from pipelines.training.checkpoint.state import newest_step
from pipelines.training.driver import settings_history
from pipelines.training.driver.output import (
    CHECKPOINTS,
    checkpoints_of,
    fetch_rank_journal,
    local_records,
    locked_run,
    publish_records,
    records_folder,
    run_location,
)
from pipelines.training.ranks.results import TrainingSummary
from pipelines.training.setup.description import describe_run, settings_of, tags_of


@dataclass(frozen=True)
class DriverRecorder:
    """Records what the driver knows about the run of a training."""

    run: TrackedRun
    folder: Path
    """Folder on this machine with the run's settings, logs and journals."""
    location: Location
    """Location of the run and its checkpoints: the same folder, or a URL."""
    _writer: RunWriter
    _micro_batches_of: Callable[[int], int | None]
    """See `RunConfig.accumulation_steps`."""
    _check_lock: Callable[[], None]

    @property
    def name(self) -> str:
        """Name of the run; its identifier if it has no name."""
        local = read_local_run(self.folder)
        assert local is not None, self.folder
        return local.description.name or self.run.run_id

    @property
    def checkpoints(self) -> Location:
        """Folder or URL of the checkpoints."""
        return self.location / CHECKPOINTS

    def attempt(self, attempt: Attempt) -> None:
        """Record the start of an attempt, its number of workers, and why the previous attempt failed.

        Raises:
            RuntimeError: Another driver has taken over the run.
        """
        self._check_lock()
        workers = str(attempt.num_workers)
        tags = {"attempt": str(attempt.number), f"attempt_{attempt.number}_workers": workers, "workers": workers}
        if attempt.number > 1:
            tags[f"attempt_{attempt.number}_after"] = attempt.after
        self._writer.tags(tags)
        if workers != settings_history.now(self.folder)["launch.num_workers"]:
            settings = {
                **settings_history.now(self.folder),
                "launch.num_workers": workers,
                "micro_batches_per_step": str(self._micro_batches_of(attempt.num_workers)),
            }
            settings_history.record_changes(self._writer, self.folder, settings, newest_step(self.checkpoints))
        self._writer.drain(patience=0)

    def environment(self, cluster: Mapping[str, Any]) -> None:
        """Record the packages, their lock file, this machine, and the known facts about the cluster."""
        facts = {**host_facts(), "locks": revision.locks(), "cluster": dict(cluster)}
        self._writer.text(packages(), "environment/packages.txt")
        self._writer.text(json.dumps(facts, indent=1), "environment/driver.json")

    def finish(self, summary: TrainingSummary | None, *, has_diverged: bool = False) -> None:
        """Record the logs of the ranks, and the journal entries that a dead rank 0 has left.

        Args:
            summary: The result of rank 0; None after a failure.
            has_diverged: Whether the failure is a divergence, see `is_divergence`. If so, the steps that led to it are
                recorded although no checkpoint contains them.

        Raises:
            TrackingError: Training is done, but the store did not receive its model or all of its records.
        """
        if (self.folder / "logs").is_dir():
            self._writer.folder(self.folder / "logs", "logs")
        # After a success, the store has just received rank 0's records.
        reason = (summary.not_recorded if summary else "") or self._writer.drain(answers=summary is not None)
        if summary is None:
            self._finish_failed(reason, has_diverged=has_diverged)
        else:
            fetch_rank_journal(self.location, self.folder)
            if reason:
                self._finish_unrecorded(summary, reason)

    def _finish_failed(self, reason: str, *, has_diverged: bool) -> None:
        """Deliver what a dead rank 0 has left, if the store answers; only the failed training is reported."""
        with suppress(StorageError):
            fetch_rank_journal(self.location, self.folder)
        left = rank_journal(self.folder)
        if reason or not left.is_dir():
            return
        writer = RunWriter(self.run, left)
        if has_diverged:
            writer.checkpointed(sys.maxsize)
        writer.drain()
        writer.close()

    def _finish_unrecorded(self, summary: TrainingSummary, reason: str) -> None:
        """Note that the run is trained, and fail if it has a store, which lacks a part of it."""
        update_local_run(self.folder, status="TRAINED", ended=now())
        if not self.run.is_offline:
            raise TrackingError(
                f"training is done, but MLflow at {redacted(self.run.uri)} has not taken all of it ({reason}). The "
                f"checkpoint is {summary.checkpoint}, what is still to be written is in {self.location}. When the "
                f"server answers again, `groundswell sync --output {self.location.parent}` writes it, or finish the "
                f"run with the same command and --set training.resume_run={self.run.run_id}"
            )


@contextmanager
def recorded_run(
    config: RunConfig, manifest: Manifest, on_news: OnNews, tags: Mapping[str, str] | None = None
) -> Iterator[DriverRecorder]:
    """Make or continue the run of a training, and set its status when the block ends: finished, failed or killed.

    If loss or gradients became not finite, the run gets the tag `diverged` with the location.

    Args:
        config: The whole configuration; `training.resume_run` names a run to continue.
        manifest: The dataset.
        on_news: Called when the store stops answering and when it answers again.
        tags: Further tags of a new run, such as its parent.

    Raises:
        ValueError: The store has no such run, or another driver trains it.
        TrackingError: The store does not answer, at the start or at the end.
    """
    resumed, output, offline = config.training.resume_run, config.training.output, config.tracking.offline
    heard = _Heard(on_news)
    with ExitStack() as stack:
        before: LocalRun | None = None
        if resumed is not None:
            run, check_lock, before = _continue_run(output, resumed, stack, offline=offline)
        else:
            description = describe_run(config, manifest, {**revision.tags(), **(tags or {})})
            run, check_lock = _start_run(output, description, stack, offline=offline)
        folder, location = records_folder(output) / run.run_id, run_location(output, run.run_id)
        stack.enter_context(_published(output, run.run_id))
        stack.enter_context(guarded(run))
        stack.enter_context(_ended(run, folder, location, heard))
        if resumed is None:
            LocalRun(run.run_id, description, now(), is_stored=not run.is_offline).write(folder)
        writer = stack.enter_context(_open_writer(run, folder, heard))
        _write_beginning(writer, folder, run, config, manifest, before)
        publish_records(output, run.run_id)
        yield DriverRecorder(run, folder, location, writer, config.accumulation_steps, check_lock)


def _continue_run(
    output: str, run_id: str, stack: ExitStack, *, offline: bool
) -> tuple[TrackedRun, Callable[[], None], LocalRun]:
    """Lock a run; return it, the function that checks the lock, and what its folder said before this attempt."""
    # The run must be ours before anything is read from it or written to it.
    check_lock = stack.enter_context(locked_run(run_location(output, run_id)))
    folder = local_records(run_location(output, run_id))
    before = read_local_run(folder)
    if before is None:
        raise ValueError(
            f"{folder} has no {FILE_NAME}, as every run's folder has: start a new run without training.resume_run"
        )
    run = TrackedRun("", run_id) if offline else runs.continue_run(run_id)
    update_local_run(folder, status="RUNNING", ended=None, is_reported=False)
    return run, check_lock, before


def _start_run(
    output: str, made: Description, stack: ExitStack, *, offline: bool
) -> tuple[TrackedRun, Callable[[], None]]:
    """Make a run and lock it; return it, and the function that checks the lock."""
    run = (
        TrackedRun("", f"offline-{uuid.uuid4().hex}")
        if offline
        else runs.start_run(made.experiment, made.name, made.parameters, made.tags, dataset=made.dataset)
    )
    try:
        check_lock = stack.enter_context(locked_run(run_location(output, run.run_id)))
    except BaseException as error:
        if not run.is_offline:
            runs.end_failed_run(run, _status_after(error))
        raise
    return run, check_lock


@contextmanager
def _open_writer(run: TrackedRun, folder: Path, heard: "_Heard") -> Iterator[RunWriter]:
    """Make the driver's writer and close it at the end; a divergence becomes a tag with its location."""
    writer = RunWriter(run, driver_journal(folder), on_news=heard)
    try:
        yield writer
    except WorkerError as error:
        if is_divergence(error):
            update_local_run(folder, has_diverged=True)
            writer.tags({DIVERGED_TAG: error.root.summary.splitlines()[0]})
            writer.drain(patience=0)
        raise
    finally:
        writer.close()
        remove_if_empty(journals(folder))


def is_divergence(error: BaseException) -> bool:
    """Return whether a training ended because its loss, a gradient or a weight became not finite."""
    return isinstance(error, WorkerError) and error.root.summary.startswith(FloatingPointError.__name__)


def _write_beginning(
    writer: RunWriter,
    folder: Path,
    run: TrackedRun,
    config: RunConfig,
    manifest: Manifest,
    before: LocalRun | None,
) -> None:
    """Record configuration and dataset, also beside the checkpoints: a model can then be made without the store.

    If a run is resumed, the tags about its earlier end are emptied. `before` is what its folder said about that end;
    None for a new run.
    """
    settings = settings_of(config, manifest)
    if before is None:
        settings_history.write(folder, settings)
        writer.text(manifest_json(manifest), "dataset.json")
    else:
        settings_history.record_changes(
            writer, folder, settings, newest_step(checkpoints_of(config.training.output, run.run_id))
        )
        tags = tags_of(config, manifest)
        if before.has_diverged:
            tags = {**tags, DIVERGED_TAG: ""}
            update_local_run(folder, has_diverged=False)
        # The driver of the earlier attempt died, according to the run's folder before this attempt or to its tags.
        if before.status == "RUNNING" or (not run.is_offline and DRIVER_DIED.items() <= queries.tags(run).items()):
            tags = {**tags, **dict.fromkeys(DRIVER_DIED, "")}
        writer.tags(tags)
    # The archive is left out, because training does not read it.
    values = text_of(config.model_dump(mode="json", exclude={"archive", "prepare"}))
    text = f"# dataset of archive {manifest.archive}, source fingerprint {manifest.source_fingerprint}\n{values}"
    writer.text(redacted(text), CONFIG_FILE)
    (folder / CONFIG_FILE).write_text(text)
    (folder / "dataset.json").write_text(manifest_json(manifest))
    writer.drain(patience=0)


@contextmanager
def _published(output: str, run_id: str) -> Iterator[None]:
    """Copy the run's records to its URL at the end, if it has one; after a failure, only that failure is reported."""
    try:
        yield
    except BaseException:
        with suppress(OSError, StorageError):
            publish_records(output, run_id, failed=True)
        raise
    publish_records(output, run_id)


class _Heard:
    """The latest news about the store, so that the driver does not ask it again during an outage."""

    def __init__(self, on_news: OnNews) -> None:
        """Assume a store that answers."""
        self._on_news = on_news
        self.away = ""
        """Reason why the store does not answer; empty if it answers."""

    def __call__(self, news: News, reason: str) -> None:
        if news != "refused":
            self.away = reason if news == "away" else ""
        self._on_news(news, reason)


@contextmanager
def _ended(run: TrackedRun, folder: Path, location: Location, heard: _Heard) -> Iterator[None]:
    """Record at the end how a run ended; after a failed training, a failure of the store is only mentioned."""
    try:
        yield
    except BaseException as error:
        _end_failed(run, folder, _status_after(error), heard.away)
        raise
    local = read_local_run(folder)
    if run.is_offline:
        if local is not None and local.status != "TRAINED":
            update_local_run(folder, status="FINISHED", ended=now())
        return
    try:
        runs.end_run(run, "FINISHED")
    except TrackingError as error:
        update_local_run(folder, status="FINISHED", ended=now())
        raise TrackingError(
            f"training is done and recorded, but the run could not be set to finished: {error}. Do so with "
            f"`groundswell sync --output {location.parent}`, or with the same command and "
            f"--set training.resume_run={run.run_id}"
        ) from None
    update_local_run(folder, status="FINISHED", ended=now(), is_reported=True)


def _status_after(error: BaseException) -> Status:
    requested = isinstance(error, RankLostError) and error.root.kind == "requested"
    return "KILLED" if requested or isinstance(error, KeyboardInterrupt) else "FAILED"


def _end_failed(run: TrackedRun, folder: Path, status: Status, away: str) -> None:
    is_reported = not run.is_offline and runs.end_failed_run(run, status, away=away)
    local = read_local_run(folder)
    if local is not None and local.status != "TRAINED":  # what is trained still becomes a finished run
        update_local_run(folder, status=status, ended=now(), is_reported=is_reported)
