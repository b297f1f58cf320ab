"""`groundswell sync`: writes to MLflow the records that trainings could not write."""

import argparse
from collections.abc import Sequence

from jobs.export import log_model_of
from jobs.shell import cli
from jobs.shell.command import Result, message_of, say
from pipelines.machine.console import counted
from pipelines.storage.folder import Location, StorageError
from pipelines.storage.locations import redacted
from pipelines.tracking.journal.local_run import RunLockedError
from pipelines.tracking.journal.sync import Synced, sync, unsynced
from pipelines.tracking.store.runs import check_store
from pipelines.tracking.store.store import tracking_uri
from pipelines.training.driver.output import locked_run
from pipelines.training.driver.remote_runs import sync_behind, unsynced_behind


def sync_runs(output: Location, run_id: str | None, result: Result) -> list[Synced]:
    """Write the records, models and ends of the runs under a folder or URL.

    Without `run_id`, a run that cannot be written does not stop the others. Its name is printed, and an error at the
    end has the number of such runs. A run in training is named and left out.

    Args:
        output: The `training.output` of the runs.
        run_id: The only run to write; None: all runs with missing records in the store.
        result: Filled in with the last run.

    Raises:
        ValueError: The folder or the run does not exist, the run is in training, or some runs could not be written.
        OSError, RuntimeError: With `run_id`: a file of the run is missing or cannot be read, or a package is missing.
        TrackingError: The store does not answer; the command can be repeated.
        StorageError: The storage behind a URL cannot be used.
    """
    if run_id is not None and not (output / run_id).is_folder():
        raise ValueError(f"there is no run {run_id} under {output}: give the training.output of the run by --output")
    written, refused = [], 0
    for place in [output / run_id] if run_id is not None else _unsynced(output):
        try:
            synced = _written(place)
        except (ValueError, OSError, RuntimeError) as error:
            if run_id is not None or isinstance(error, StorageError):
                raise
            if not isinstance(error, ValueError):
                check_store()  # no other record can be written while the store is away
            is_left_out = isinstance(error, RunLockedError)
            say(f"run {place.name}: {'left out' if is_left_out else 'not written'}: {message_of(error)}")
            refused += not is_left_out
            continue
        result.run_id, result.model_uri = synced.run_id, synced.model_uri or None
        say(*lines_of(synced, place.name))
        written.append(synced)
    if refused:
        raise ValueError(f"{refused} runs of {output} could not be written, {len(written)} were")
    return written


def _written(place: Location) -> Synced:
    if place.is_local:
        return sync(place.path, log_model_of, lock=lambda _: locked_run(place))
    return sync_behind(place, log_model_of)


def _unsynced(output: Location) -> Sequence[Location]:
    return [output / path.name for path in unsynced(output.path)] if output.is_local else unsynced_behind(output)


def lines_of(synced: Synced, name: str) -> list[str]:
    """Return lines about the written records of a run whose folder had this name."""
    was = f" (was {name})" if name != synced.run_id else ""
    lines = [f"run {synced.run_id}{was}: {synced.status.lower()}"]
    if synced.model_uri:
        lines.append(f"model {synced.model_uri}")
    if synced.waiting:
        lines.append(
            f"{synced.waiting} records are of steps that no checkpoint holds: they wait in case the run is resumed"
        )
    return lines


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Write as the command line says."""
    output = Location.at(arguments.output)
    written = sync_runs(output, arguments.run, result)
    say(f"{counted(len(written), 'run')} of {output} written to {redacted(tracking_uri())}")


if __name__ == "__main__":
    cli.main("sync")
