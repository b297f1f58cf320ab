"""What the driver writes to the tracked run of a training: its settings, attempts, logs and end."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.schema import RunConfig
from pipelines.dataset.manifest import Manifest, manifest_json
from pipelines.launch.failure import RankLostError
from pipelines.launch.runner import Attempt
from pipelines.locations import redacted
from pipelines.tracking import revision, runs
from pipelines.tracking.delivery import OnNews
from pipelines.tracking.journal import driver_journal, journals, rank_journal
from pipelines.tracking.store import TrackedRun, TrackingError
from pipelines.tracking.writer import RunWriter
from pipelines.training.checkpoint import list_checkpoints
from pipelines.training.results import TrainingSummary

_SETTINGS_FILE = "settings.json"
_NEVER_A_CHANGE = ("training.resume_run", "training.output", "dataset.path")


@dataclass(frozen=True)
class DriverRecord:
    """One training's run as the driver sees it."""

    run: TrackedRun
    folder: Path
    """Folder of the run: checkpoints, logs, journals."""
    _writer: RunWriter

    def attempt(self, attempt: Attempt) -> None:
        """Record that an attempt begins, and why the one before failed."""
        tags = {"attempt": str(attempt.number)}
        if attempt.number > 1:
            tags[f"attempt_{attempt.number}_after"] = attempt.after
        self._writer.tags(tags)
        self._writer.drain(patience=0)

    def finish(self, summary: TrainingSummary | None) -> None:
        """Record the logs of the ranks, and what a rank 0 that died has left.

        Args:
            summary: What rank 0 returned; None after a failure.

        Raises:
            TrackingError: Training is done, and the store has not taken its model or all of its records.
        """
        reason = summary.not_recorded if summary else ""
        if (self.folder / "logs").is_dir():
            self._writer.folder(self.folder / "logs", "logs")
        if not reason:
            reason = self._writer.drain()
        left = rank_journal(self.folder)
        if summary is None and left.is_dir() and not reason:
            writer = RunWriter(self.run, left)
            reason = writer.drain()
            writer.close()
        if summary is not None and reason:
            raise TrackingError(
                f"training is done, but MLflow at {redacted(self.run.uri)} has not taken all of it ({reason}). The "
                f"checkpoint is {summary.checkpoint}, what is still to be written is in {journals(self.folder)}. "
                "When the server answers again, finish the run with the same command and "
                f"--set training.resume_run={self.run.run_id}"
            )


@contextmanager
def recorded_run(config: RunConfig, manifest: Manifest, on_news: OnNews) -> Iterator[DriverRecord]:
    """Make or continue the run of a training, and end it as the block ends: finished, failed or killed.

    Args:
        config: The whole configuration; `training.resume_run` names a run to continue.
        manifest: The dataset.
        on_news: Is told when the store does not answer and when it does again.

    Raises:
        ValueError: The store has no such run.
        TrackingError: The store does not answer, at the start or at the end.
    """
    settings = settings_of(config, manifest)
    if config.training.resume_run is not None:
        run = runs.continue_run(config.training.resume_run)
    else:
        run = runs.start_run(
            config.tracking.experiment,
            config.tracking.run_name,
            settings,
            {
                "mlflow.source.name": "groundswell train",
                "mlflow.source.type": "JOB",
                "dataset_fingerprint": manifest.fingerprint,
                **revision.tags(),
            },
        )
    with _ended(run):
        folder = Path(config.training.output) / run.run_id
        writer = RunWriter(run, driver_journal(folder), on_news=on_news)
        try:
            if config.training.resume_run is None:
                _write_settings(folder, {"now": settings, "changes": []})
                writer.text(manifest_json(manifest), "dataset.json")
            else:
                _record_changes(writer, folder, run, settings)
            writer.text(_as_yaml(config, manifest), "config.yaml")
            writer.drain(patience=0)
            yield DriverRecord(run, folder, writer)
        finally:
            writer.close()
            with suppress(OSError):  # one of the journals is kept
                journals(folder).rmdir()


def newest_resumable(config: RunConfig) -> runs.UnfinishedRun:
    """Return the newest run of the experiment that is not finished and has checkpoints under `training.output`.

    Raises:
        ValueError: There is none.
        TrackingError: The store does not answer.
    """
    unfinished = runs.unfinished_runs(config.tracking.experiment)
    for run in unfinished:
        if list_checkpoints(Path(config.training.output) / run.run_id / "checkpoints"):
            return run
    raise ValueError(
        f"training.resume_run=latest: {len(unfinished)} runs of experiment {config.tracking.experiment!r} are not "
        f"finished, and none has checkpoints under {config.training.output}: name a run, or start a new one"
    )


def settings_of(config: RunConfig, manifest: Manifest) -> dict[str, str]:
    """Return the settings that hold for a training, by key: the archive is the dataset's, not the configuration's."""
    values = config.model_dump(mode="json", exclude={"archive", "prepare"})
    made = {f"prepare.{name}": value for name, value in manifest.settings.items()}
    flat = {
        **_flat(values),
        **made,
        "archive.kind": manifest.archive,
        "archive.source_fingerprint": manifest.source_fingerprint,
        "global_batch_size": config.global_batch_size,
        "micro_batches_per_step": config.accumulation_steps(config.launch.num_workers),
        "dataset_fingerprint": manifest.fingerprint,
    }
    return {key: str(value) for key, value in flat.items()}


def _as_yaml(config: RunConfig, manifest: Manifest) -> str:
    """The configuration that holds, for `--config`, without the archive, which training does not read."""
    values = yaml.safe_dump(config.model_dump(mode="json", exclude={"archive", "prepare"}), sort_keys=False)
    return f"# dataset of archive {manifest.archive}, source fingerprint {manifest.source_fingerprint}\n{values}"


def _record_changes(writer: RunWriter, folder: Path, run: TrackedRun, settings: Mapping[str, str]) -> None:
    """Record which settings differ from those so far, and from which step on; parameters of a run cannot change."""
    file = folder / _SETTINGS_FILE
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"now": runs.parameters(run)}
    before, step = known["now"], _newest_step(folder / "checkpoints")
    changes = [
        {"step": step, "setting": key, "before": before[key], "after": settings[key]}
        for key in sorted(settings.keys() & before.keys())
        if settings[key] != before[key] and key not in _NEVER_A_CHANGE
    ]
    history = [*known.get("changes", []), *changes]
    if changes:
        writer.tags({f"changed.{change['setting']}": f"{change['after']} from step {step}" for change in changes})
    if history:
        writer.table(history, "settings_history.json")
    _write_settings(folder, {"now": dict(settings), "changes": history})


def _newest_step(checkpoints: Path) -> int:
    existing = list_checkpoints(checkpoints)
    return int(existing[-1].stem.removeprefix("step-")) if existing else 0


def _write_settings(folder: Path, values: Mapping[str, Any]) -> None:
    temporary = folder / f".{_SETTINGS_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(values, indent=1))
    temporary.replace(folder / _SETTINGS_FILE)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


@contextmanager
def _ended(run: TrackedRun) -> Iterator[None]:
    """Say at the end how a run ended; of a failure, the store's own is only mentioned."""
    try:
        yield
    except KeyboardInterrupt:
        runs.end_failed_run(run, "KILLED")
        raise
    except BaseException as error:
        requested = isinstance(error, RankLostError) and error.root.kind == "requested"
        runs.end_failed_run(run, "KILLED" if requested else "FAILED")
        raise
    try:
        runs.end_run(run, "FINISHED")
    except TrackingError as error:
        raise TrackingError(
            f"training is done and recorded, but the run could not be set to finished: {error}. Do so with the same "
            f"command and --set training.resume_run={run.run_id}"
        ) from None
