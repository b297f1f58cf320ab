"""The checks of a rank's host before training; this module imports no TensorFlow."""

import importlib.util
import os
import socket
from dataclasses import dataclass

from pipelines.dataset.format.manifest import read_manifest
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.files import check_writable

_PACKAGES = ("tensorflow", "keras", "horovod", "mlflow")


@dataclass(frozen=True)
class HostReport:
    """The host of a rank, and the problems found there."""

    host: str
    problems: tuple[str, ...]


def look(output: str, dataset: str) -> HostReport:
    """Check on a rank's host for packages, the dataset and the folder of the checkpoints.

    Args:
        output: `training.output`.
        dataset: `dataset.path`.
    """
    problems = [f"the package {name} is not installed" for name in _PACKAGES if not importlib.util.find_spec(name)]
    try:
        read_manifest(dataset)
    except (OSError, ValueError, RuntimeError) as error:
        problems.append(f"dataset.path: {error}")
    location = Location(output)
    if not location.is_local:
        try:
            check_writable(location)
        except (RuntimeError, OSError) as error:
            problems.append(f"training.output: {error}")
    elif not location.is_folder():
        problems.append(f"training.output={location} does not exist here: it must be on storage that all hosts mount")
    elif not os.access(location, os.W_OK | os.X_OK):
        problems.append(f"training.output={location} cannot be written here")
    return HostReport(socket.gethostname(), tuple(problems))
