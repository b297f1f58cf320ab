"""Finds missing packages that a job needs beside Groundswell's dependencies, and the command that installs them."""

import json
import os
import shlex
from collections.abc import Sequence
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from pipelines.machine.versions import NOT_INSTALLED, OWN, version_of

SPARK = ("pyspark",)
MODEL = ("tensorflow", "keras")
SCORING = ("pyspark", "tensorflow", "keras")
CONVERSION = ("openvino", "nncf")
DELTA = ("deltalake",)
TRAINING = ("pyspark", "tensorflow", "keras", "horovod")
_EXTRAS = {
    "pyspark": "local",
    "tensorflow": "cpu",
    "keras": "cpu",
    "petastorm": "petastorm",
    "openvino": "score",
    "nncf": "score",
    "deltalake": "score",
}
"""Extra of the wheel that installs a package."""
_HOROVOD = "Horovod 0.28.1 built for this TensorFlow (docker/horovod/build_wheel.sh makes its wheel)"


class MissingPackageError(RuntimeError):
    """A package is missing on the driver; nothing was started."""


def require(what: str, packages: Sequence[str]) -> None:
    """Check that packages are installed, without importing them.

    Args:
        what: What needs the packages: the subject of the message.
        packages: Import names of the packages.

    Raises:
        MissingPackageError: Some are missing; one line names them and the command that installs them.
        ValueError: `check_backend` fails, if Horovod is one of them.
    """
    missing = [name for name in packages if not _is_installed(name)]
    if "horovod" in packages and "horovod" not in missing and not _horovod_knows_tensorflow():
        raise MissingPackageError(f"{what} needs Horovod with its TensorFlow part, which this one lacks: {_HOROVOD}")
    if not missing:
        if "horovod" in packages:
            check_backend(what)
        return
    remedies = []
    extras = [_EXTRAS[name] for name in missing if name in _EXTRAS]
    if extras:
        present = [name for name in _EXTRAS if name not in missing]
        remedies.append(f"pip install {shlex.join(_requirements(list(dict.fromkeys(extras)), present))}")
        if "tensorflow" in missing:
            remedies[-1] += " (with GPUs: tensorflow[and-cuda] in place of tensorflow-cpu)"
    if "horovod" in missing:
        remedies.append(_HOROVOD)
    raise MissingPackageError(
        f"{what} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
        f"{'; and '.join(remedies)}"
    )


def check_backend(what: str) -> None:
    """Check that Keras would use TensorFlow, whose tensors Horovod averages, without importing either.

    Raises:
        ValueError: Another backend is chosen; one line says where.
    """
    backend, where = os.environ.get("KERAS_BACKEND"), "KERAS_BACKEND"
    if not backend:
        file = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras") / "keras.json"
        try:
            backend, where = json.loads(file.read_text()).get("backend"), f"the backend in {file}"
        except (OSError, ValueError, AttributeError):  # Keras then uses its default, too
            return
    if backend not in (None, "tensorflow"):
        raise ValueError(f"{what} needs TensorFlow, and {where} is {backend}: set KERAS_BACKEND=tensorflow")


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # a folder of that name without `__init__.py` is no package


def _horovod_knows_tensorflow() -> bool:
    spec = find_spec("horovod")
    folders = spec.submodule_search_locations or [] if spec is not None else []
    return any(list(Path(folder, "tensorflow").glob("mpi_lib*.so")) for folder in folders)


def _requirements(extras: Sequence[str], present: Sequence[str]) -> list[str]:
    """Return the requirements of the wheel's extras; only their names if Groundswell runs from a folder or a .zip.

    Installed packages are left out: an extra may ask for another build of them, for example of TensorFlow.

    The result is never `groundswell[extra]`: no index has this distribution, and the name could be somebody else's.
    """
    lines = [] if version_of(OWN) == NOT_INSTALLED else requires(OWN) or []
    found = []
    for each in map(Requirement, lines):
        is_wanted = each.marker is not None and any(each.marker.evaluate({"extra": extra}) for extra in extras)
        if is_wanted and each.name.removesuffix("-cpu") not in present:
            each.marker = None
            found.append(str(each))
    return found or [f"<the wheel of groundswell>[{','.join(extras)}]"]
