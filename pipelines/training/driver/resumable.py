"""The runs that a training can continue: the newest unfinished one, and one that the store does not have yet."""

import logging
from pathlib import Path

from conf.schema import RunConfig
from conf.sections.launch import TrackingConfig
from pipelines.tracking.journal.local_run import LocalRun, read_local_run
from pipelines.tracking.journal.sync import adopt
from pipelines.tracking.store import queries
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.training.checkpoint.files import list_checkpoints
from pipelines.training.driver.output import checkpoints_of, locked_run, run_location
from pipelines.training.driver.remote_runs import adopt_behind

_log = logging.getLogger(__name__)


def with_stored_run(config: RunConfig) -> RunConfig:
    """Add the run to continue to the store, if it was trained without the store so far.

    Returns:
        The configuration with the run's identifier in the store.

    Raises:
        ValueError: Another driver trains the run.
        TrackingError: The store does not answer.
    """
    resumed = config.training.resume_run
    if resumed is None or config.tracking.offline:
        return config
    location = run_location(config.training.output, resumed)
    if not location.is_local:
        run_id = adopt_behind(location)
    elif read_local_run(location.path) is None:
        return config
    else:
        with locked_run(location):
            run_id = adopt(location.path)[0].run_id
    return config.model_copy(update={"training": config.training.model_copy(update={"resume_run": run_id})})


def newest_resumable(output: str, tracking: TrackingConfig) -> queries.UnfinishedRun:
    """Return the newest unfinished run of the experiment with checkpoints under `training.output`.

    Args:
        output: `training.output`.
        tracking: The settings that name the experiment.

    Raises:
        ValueError: There is no such run.
        TrackingError: The store does not answer.
    """
    experiment = chosen_experiment(tracking.experiment, offline=tracking.offline)
    unfinished = _unfinished_here(output, experiment) if tracking.offline else queries.unfinished_runs(experiment)
    for run in unfinished:
        if list_checkpoints(checkpoints_of(output, run.run_id)):
            return run
    raise ValueError(
        f"training.resume_run=latest: no run to resume in {output}: none of the unfinished runs of experiment "
        f"{experiment!r} ({len(unfinished)}) has checkpoints there: name a run, or start a new one"
    )


def _unfinished_here(output: str, experiment: str) -> list[queries.UnfinishedRun]:
    """Return the unfinished runs of the experiment under `training.output`, the newest first."""
    folders = [each for each in Path(output).glob("*") if each.is_dir() and not each.is_symlink()]
    found = [local for folder in folders if (local := _local_run(folder))]
    return [
        queries.UnfinishedRun(each.run_id, each.description.name or "", each.status)
        for each in sorted(found, key=lambda each: each.started, reverse=True)
        if each.description.experiment == experiment and each.status not in ("FINISHED", "TRAINED")
    ]


def _local_run(folder: Path) -> LocalRun | None:
    try:
        return read_local_run(folder)
    except (OSError, ValueError) as error:  # of another user, or damaged
        _log.warning("passed over: %s", error)
        return None
