"""Checkpoints: plain arrays and JSON in one file, whole or not there, the newest two kept."""

import json
import logging
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import keras
import numpy as np
from numpy.typing import NDArray

KEPT = 2
_FORMAT_VERSION = 1
_STATE = "state.json"
_NAME = re.compile(r"epoch-(\d{5})\.npz")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands, beside its variables."""

    epochs_done: int
    step: int
    """Optimizer steps done."""
    seed: int
    global_batch_size: int
    run_id: str
    history: list[dict[str, float]]
    """Metrics of each epoch done."""


def save_checkpoint(folder: Path, state: TrainingState, variables: Sequence[keras.Variable]) -> Path:
    """Write `epoch-NNNNN.npz` atomically and remove all but the newest `KEPT`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"epoch-{state.epochs_done:05d}.npz"
    temporary = folder / f".{path.name}.{os.getpid()}"
    header = json.dumps({"format_version": _FORMAT_VERSION, **asdict(state)}).encode()
    arrays = {_name(i, v): np.asarray(v) for i, v in enumerate(variables)}
    try:
        with temporary.open("wb") as file:
            np.savez(file, **{_STATE: np.frombuffer(header, np.uint8)}, **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    for old in list_checkpoints(folder)[:-KEPT]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("epoch-*.npz") if _NAME.fullmatch(path.name))


def restore_newest(folder: Path, variables: Sequence[keras.Variable]) -> TrainingState | None:
    """Load the newest checkpoint that verifies into `variables`; None where there is none.

    Raises:
        ValueError: It is of another model or optimizer.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            state, arrays = _read(path)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            _log.warning("checkpoint %s is damaged (%s); trying the one before", path, error)
            continue
        _assign(path, arrays, variables)
        return state
    return None


def _read(path: Path) -> tuple[TrainingState, dict[str, NDArray[np.generic]]]:
    # Each member's CRC is verified as it is read; no pickled objects.
    with np.load(path, allow_pickle=False) as file:
        header = json.loads(file[_STATE].tobytes())
        if header.pop("format_version") != _FORMAT_VERSION:
            raise ValueError("another format version")
        return TrainingState(**header), {name: file[name] for name in file.files if name != _STATE}


def _assign(path: Path, arrays: dict[str, NDArray[np.generic]], variables: Sequence[keras.Variable]) -> None:
    expected = {_name(i, v): tuple(v.shape) for i, v in enumerate(variables)}
    found = {name: array.shape for name, array in arrays.items()}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(
            f"checkpoint {path} is of another model or optimizer: {len(differing)} variables differ, the first is "
            f"{differing[0]!r} ({found.get(differing[0])} there, {expected.get(differing[0])} here)"
        )
    for i, variable in enumerate(variables):
        variable.assign(arrays[_name(i, variable)])


def _name(position: int, variable: keras.Variable) -> str:
    # Optimizer slots may share a path: the position makes the name unique. "/" would make folders in the archive.
    return f"{position:05d}:{variable.path.replace('/', '.')}"
