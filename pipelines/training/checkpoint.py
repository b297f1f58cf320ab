"""Checkpoints: plain arrays and JSON in one file, whole or not there, the newest two kept."""

import json
import logging
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import keras

KEPT = 2
_FORMAT_VERSION = 1
_STATE = "state.json"
_NAME = re.compile(r"step-(\d{8})\.npz")
_DAMAGE = (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands, beside its variables."""

    epochs_done: int
    """Whole ones."""
    step: int
    """Optimizer steps done."""
    seed: int
    global_batch_size: int
    run_id: str
    dataset_fingerprint: str
    history: list[dict[str, float]]
    """Metrics of each epoch done."""
    loss_sum: float = 0.0
    """Of the steps of the epoch under way, over all ranks."""
    loss_count: int = 0
    exchange_ranks: int = 0
    """Ranks whose exchange state lies beside the checkpoint; 0: the exchange has none."""
    order: str = ""
    """What, beside seed and dataset, decides the order of samples: the reader, and its window where it has one."""

    @property
    def is_within_an_epoch(self) -> bool:
        """Whether an epoch has been begun."""
        return self.loss_count > 0


def checkpoint_path(folder: Path, step: int) -> Path:
    """Of the checkpoint after so many optimizer steps."""
    return folder / f"step-{step:08d}.npz"


def save_checkpoint(folder: Path, state: TrainingState, variables: Sequence["keras.Variable"]) -> Path:
    """Write `step-NNNNNNNN.npz` atomically and remove all but the newest `KEPT`."""
    header = json.dumps({"format_version": _FORMAT_VERSION, **asdict(state)}).encode()
    arrays = {_name(i, v): np.asarray(v) for i, v in enumerate(variables)}
    path = checkpoint_path(folder, state.step)
    _write(path, {_STATE: np.frombuffer(header, np.uint8), **arrays})
    for leftover in folder.glob(".step-*"):  # of a process that was killed while it wrote
        leftover.unlink(missing_ok=True)
    # Never the one just written: damaged ones with higher numbers may lie beside it.
    for old in [other for other in list_checkpoints(folder) if other != path][: -(KEPT - 1)]:
        old.unlink()
        for part in folder.glob(f"{old.stem}.rank-*.npz"):
            part.unlink()
    return path


def save_rank_state(folder: Path, step: int, rank: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write what one rank's exchange keeps, before the checkpoint of that step is written."""
    _write(_rank_path(checkpoint_path(folder, step), rank), arrays)


def check_rank_states(folder: Path, step: int, ranks: int) -> None:
    """Refuse a folder in which not every rank's file has arrived.

    Raises:
        RuntimeError: Ranks write to different disks.
    """
    missing = [rank for rank in range(ranks) if not _rank_path(checkpoint_path(folder, step), rank).is_file()]
    if missing:
        raise RuntimeError(
            f"rank {missing[0]} wrote its part of the checkpoint elsewhere than {folder}: set training.output to "
            "storage that all hosts mount"
        )


def read_rank_states(checkpoint: Path, ranks: int) -> list[dict[str, NDArray[Any]]]:
    """What the exchanges of all ranks kept, in rank order."""
    states = []
    for rank in range(ranks):
        with np.load(_rank_path(checkpoint, rank), allow_pickle=False) as file:
            states.append({name: file[name] for name in file.files})
    return states


def _rank_path(checkpoint: Path, rank: int) -> Path:
    return checkpoint.with_name(f"{checkpoint.stem}.rank-{rank:05d}.npz")


def _write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.savez(file, **dict(arrays))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("step-*.npz") if _NAME.fullmatch(path.name))


def newest_checkpoint(folder: Path) -> tuple[Path, TrainingState]:
    """The newest checkpoint that verifies, and where its training stands.

    Raises:
        FileNotFoundError: There are no checkpoints.
        ValueError: There are, and none verifies.
    """
    paths = list_checkpoints(folder)
    if not paths:
        raise FileNotFoundError(f"no checkpoints in {folder}: is training.output that of the first run?")
    for path in reversed(paths):
        try:
            state = _read(path)[0]
            read_rank_states(path, state.exchange_ranks)  # they verify too
            return path, state
        except _DAMAGE as error:
            _log.warning("checkpoint %s is damaged (%s); trying the one before", path, error)
    raise ValueError(f"every checkpoint in {folder} is damaged: start a new run without training.resume_run")


def restore(path: Path, variables: Sequence["keras.Variable"]) -> None:
    """Load a checkpoint into `variables`.

    Raises:
        ValueError: It is of another model or optimizer.
    """
    _assign(path, _read(path)[1], variables)


def _read(path: Path) -> tuple[TrainingState, dict[str, NDArray[Any]]]:
    # Each member's CRC is verified as it is read; no pickled objects.
    with np.load(path, allow_pickle=False) as file:
        header = json.loads(file[_STATE].tobytes())
        if header.pop("format_version") != _FORMAT_VERSION:
            raise ValueError("another format version")
        header["history"] = [_with_groups(metrics) for metrics in header["history"]]
        return TrainingState(**header), {name: file[name] for name in file.files if name != _STATE}


def _with_groups(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of one epoch by today's names; those of older checkpoints have no groups."""
    names = {
        "train_loss": "train/loss",
        "images_per_second": "speed/images_per_second",
        "input_wait_fraction": "time/input_wait_fraction",
    }
    return {names.get(name, re.sub("^val_", "val/", name)): value for name, value in metrics.items()}


def _assign(path: Path, arrays: dict[str, NDArray[Any]], variables: Sequence["keras.Variable"]) -> None:
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


def _name(position: int, variable: "keras.Variable") -> str:
    # Optimizer slots may share a path: the position makes the name unique. "/" would make folders in the archive.
    return f"{position:05d}:{variable.path.replace('/', '.')}"
