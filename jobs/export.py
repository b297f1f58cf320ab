"""`groundswell export`: logs the model of a checkpoint to its run, without training."""

import argparse
import os
from pathlib import Path

from jobs.shell import cli
from jobs.shell.command import Result, say
from pipelines.machine.packages import MODEL, require
from pipelines.storage.folder import Location
from pipelines.tracking.journal.local_run import read_local_run
from pipelines.tracking.store.store import TrackedRun, tracking_uri
from pipelines.training.driver.output import CHECKPOINTS, local_records, locked_run


def log_model_of(
    folder: Path, run: TrackedRun, checkpoint: Location | None = None, checkpoints: Location | None = None
) -> str:
    """Run `pipelines.training.driver.export.log_model_of`, which imports TensorFlow, on the CPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # the driver's machine may train on its GPU
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    require("the model of a checkpoint", MODEL)
    from pipelines.training.driver import export

    return export.log_model_of(folder, run, checkpoint, checkpoints)


def export_model(place: Location, checkpoint: Location | None = None) -> str:
    """Log the model of a run's checkpoint; return its URI.

    Args:
        place: The run's folder, or its URL.
        checkpoint: Checkpoint; None: that of the best epoch if `training.selection` asks for it, else the newest.

    Raises:
        ValueError, FileNotFoundError: The run or the checkpoint does not exist, or the store does not have the run.
        TrackingError: The store did not accept the model.
    """
    if not place.is_folder():
        raise ValueError(
            f"there is no run {place.name} under {place.parent}: give the training.output of the run by --output"
        )
    with locked_run(place):
        folder = local_records(place)
        local = read_local_run(folder)
        if local is not None and not local.is_stored:
            raise ValueError(
                f"MLflow does not have run {folder.name} yet: `groundswell sync --output {folder.parent}` writes it, "
                "with its model"
            )
        run = TrackedRun(tracking_uri(), folder.resolve().name)
        return log_model_of(folder, run, checkpoint, place / CHECKPOINTS)


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Export as the command line says."""
    output = Location.at(arguments.output)
    checkpoint = None if arguments.checkpoint is None else Location.at(arguments.checkpoint)
    result.run_id = arguments.run
    result.save()
    result.model_uri = export_model(output / arguments.run, checkpoint)
    say(f"model {result.model_uri}")


if __name__ == "__main__":
    cli.main("export")
