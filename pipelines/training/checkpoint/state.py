"""Checkpoints: arrays and JSON in one file, which is written atomically. The newest two and the best one are retained.

`step-NNNNNNNN.npz` holds `state.json` and one array for each variable of model and optimizer. `state.json` has the
fields of `TrainingState` and the format version. An exchange with state adds one `step-NNNNNNNN.rank-RRRRR.npz` per
rank.

The state may gain fields, and a reader ignores fields that it does not know. A checkpoint of another format is an error
and is never skipped.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelines.machine.json_text import parse_json
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.files import (
    Arrays,
    DamagedError,
    UnknownFormatError,
    checkpoint_path,
    elsewhere,
    list_checkpoints,
    opened,
    rank_path,
    refuse_non_finite,
    remove_leftovers,
    write_arrays,
)

if TYPE_CHECKING:
    import keras

    from pipelines.training.checkpoint.scattered import Gathered, Scattered

RETAINED = 2
FORMAT_VERSION = 2
_STATE = "state.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """The progress of a run, without the values of its variables."""

    epochs_done: int
    """Number of complete epochs."""
    step: int
    """Number of optimizer steps done."""
    seed: int
    global_batch_size: int
    run_id: str
    dataset_fingerprint: str
    history: list[dict[str, float]]
    """Metrics of each epoch done."""
    loss_sum: float = 0.0
    """Sum of the losses of the unfinished epoch's steps, over all ranks."""
    loss_count: int = 0
    """Number of the losses in `loss_sum`; 0 between two epochs."""
    epoch_seconds: float = 0.0
    """Seconds of those steps on rank 0, without compiling."""
    epoch_payload_bytes: float = 0.0
    """Payload of those steps on rank 0."""
    exchange_ranks: int = 0
    """Number of ranks whose exchange state was saved with the checkpoint; 0 if the exchange has no state."""
    order: str = ""
    """The factors that decide the order of samples in addition to seed and dataset: the reader and its window."""
    settings: dict[str, str] = field(default_factory=dict)
    """The settings that the checkpoint was written with, by key, and the versions of Groundswell, Keras, TensorFlow."""
    thresholds: dict[str, list[float]] = field(default_factory=dict)
    """Thresholds of `results.thresholds_of` at the end of the epoch; empty within an epoch."""

    variables: int = field(default=0, compare=False)
    """Number of variables in the file; `save_checkpoint` sets it."""

    @property
    def is_within_an_epoch(self) -> bool:
        """Whether the checkpoint was written between the first and the last step of an epoch."""
        return self.loss_count > 0

    def with_losses_of(self, ranks: int, *, steps_per_epoch: int) -> "TrainingState":
        """Rescale the losses of the unfinished epoch to this number of ranks, with one loss per rank and step.

        Otherwise steps of more ranks would have a larger weight in the mean of an epoch that fewer ranks finish.
        """
        if not self.is_within_an_epoch:
            return self
        count = ranks * (self.step - self.epochs_done * steps_per_epoch)
        return replace(self, loss_sum=self.loss_sum * count / self.loss_count, loss_count=count)


def save_checkpoint(
    folder: Location,
    state: TrainingState,
    variables: Sequence["keras.Variable | Gathered"],
    *,
    spared: int | None = None,
) -> Location:
    """Write `step-NNNNNNNN.npz` atomically, then remove all but the newest `RETAINED` checkpoints.

    Args:
        folder: Folder of the run's checkpoints, on this machine or behind a URL.
        state: Progress of the run.
        variables: Variables that the checkpoint contains.
        spared: Number of optimizer steps of the checkpoint that is never removed.

    Raises:
        FloatingPointError: A variable has a value that is not finite. Nothing is written.
        OSError: The file cannot be written. No part of it remains.
    """
    arrays = {array_name(i, v): np.asarray(v.value) for i, v in enumerate(variables)}
    refuse_non_finite(arrays)
    header = json.dumps({"format_version": FORMAT_VERSION, **asdict(state), "variables": len(arrays)}).encode()
    path = checkpoint_path(folder, state.step)
    write_arrays(path, {_STATE: np.frombuffer(header, np.uint8), **arrays})
    # The checkpoint just written is excluded, because damaged checkpoints with higher numbers may exist.
    for old in [other for other in list_checkpoints(folder) if other != path][: -(RETAINED - 1)]:
        if spared is None or old != checkpoint_path(folder, spared):
            old.remove()
    remove_leftovers(folder, state.step)
    return path


def save_rank_state(folder: Location, step: int, rank: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write the exchange state of one rank before the checkpoint of the same step is written.

    Raises:
        FloatingPointError: An array has a value that is not finite. Nothing is written.
        OSError: The file cannot be written. No part of it remains.
    """
    refuse_non_finite(arrays)
    write_arrays(rank_path(checkpoint_path(folder, step), rank), arrays)


def check_rank_states(folder: Location, step: int, ranks: int) -> None:
    """Check that the files of all ranks are in the folder.

    Raises:
        RuntimeError: Ranks write to different disks.
    """
    checkpoint = checkpoint_path(folder, step)
    there = {path.name for path in folder.glob(f"{checkpoint.stem}.rank-*.npz")}
    missing = [rank for rank in range(ranks) if rank_path(checkpoint, rank).name not in there]
    if missing:
        raise RuntimeError(elsewhere(missing[0], folder))


class RankStates(Sequence[Arrays]):
    """The exchange states beside a checkpoint, in rank order; each access reads one rank's file."""

    def __init__(self, checkpoint: Location, ranks: int) -> None:
        """Store the arguments without opening a file."""
        self._checkpoint, self._ranks = checkpoint, ranks

    def __len__(self) -> int:
        """Return the number of ranks that saved the checkpoint."""
        return self._ranks

    def __getitem__(self, rank: int) -> Arrays:  # type: ignore[override]  # no slices
        """Read the state of one rank.

        Raises:
            IndexError: There is no such rank.
            DamagedError: The file is missing or damaged.
        """
        if not 0 <= rank < self._ranks:
            raise IndexError(rank)
        path = rank_path(self._checkpoint, rank)
        try:
            with opened(path) as file:
                arrays = {name: file[name] for name in file.files}
                refuse_non_finite(arrays)
        except DamagedError as error:
            raise DamagedError(f"{path.name}: {error}") from error
        return arrays


def newest_step(folder: Location) -> int:
    """Return the number of steps of the newest checkpoint, from its name; 0 if there is none."""
    written = list_checkpoints(folder)
    return int(written[-1].stem.removeprefix("step-")) if written else 0


def newest_state(folder: Location) -> tuple[Location, TrainingState]:
    """Return the newest checkpoint whose state can be read, and that state; its arrays are not read.

    Raises:
        FileNotFoundError: There are no checkpoints.
        ValueError: No checkpoint can be read, or one has an unknown format.
    """
    if not list_checkpoints(folder):
        raise FileNotFoundError(f"no checkpoints in {folder}: is training.output that of the first run?")
    for newest in readable(folder, read_state):
        return newest
    raise all_damaged(folder)


def readable(folder: Location, read: Callable[[Location], Any]) -> Iterator[tuple[Location, Any]]:
    """Yield the checkpoints that can be read, the newest first, with what `read` returns; warn of the others.

    Args:
        folder: Folder of the run's checkpoints.
        read: `read_state`, or `read_checkpoint` for those that are also complete and finite.

    Raises:
        ValueError: A checkpoint has an unknown format.
    """
    for path in reversed(list_checkpoints(folder)):
        try:
            yield path, read(path)
        except DamagedError as error:
            _log.warning("checkpoint %s is damaged (%s); trying the one before", path, error)


def read_checkpoint(path: Location) -> tuple[TrainingState, Arrays]:
    """Read one checkpoint.

    Raises:
        DamagedError: The checkpoint is missing, damaged or not finite.
        ValueError: The checkpoint has an unknown format.
    """
    with opened(path) as file:
        state = _read_state(path, file)
        arrays = {name: file[name] for name in file.files if name != _STATE}
        if state.variables != len(arrays):
            raise ValueError(f"it has {len(arrays)} of {state.variables} variables")
        refuse_non_finite(arrays)
    return state, arrays


def read_state(path: Location) -> TrainingState:
    """Read the state of one checkpoint, without its arrays.

    Raises:
        DamagedError: The checkpoint is missing or damaged.
        ValueError: The checkpoint has an unknown format.
    """
    with opened(path) as file:
        return _read_state(path, file)


def read_arrays(path: Location) -> tuple[TrainingState, Arrays]:
    """Read one checkpoint.

    Raises:
        ValueError: The checkpoint is damaged or has an unknown format.
    """
    try:
        with opened(path) as file:
            return _read_state(path, file), {name: file[name] for name in file.files if name != _STATE}
    except DamagedError as error:
        raise ValueError(f"{path} is damaged, or no checkpoint ({error})") from error


def all_damaged(folder: Location) -> ValueError:
    """Return the error for a folder whose checkpoints cannot be used."""
    return ValueError(f"every checkpoint in {folder} is damaged: start a new run without training.resume_run")


def assign_arrays(path: Location, arrays: Arrays, variables: Sequence["keras.Variable | Scattered"]) -> None:
    """Set `variables` to the arrays of the checkpoint at `path`.

    Raises:
        ValueError: The checkpoint is of another model or optimizer.
    """
    expected = {array_name(i, v): tuple(v.shape) for i, v in enumerate(variables)}
    found = {name: array.shape for name, array in arrays.items()}
    if expected != found:
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(
            f"checkpoint {path} is of another model or optimizer: {len(differing)} variables differ, the first is "
            f"{differing[0]!r} ({found.get(differing[0])} in the checkpoint, {expected.get(differing[0])} in this run)"
        )
    for i, variable in enumerate(variables):
        variable.assign(arrays[array_name(i, variable)])


def array_name(position: int, variable: "keras.Variable | Scattered | Gathered") -> str:
    """Return the name in a checkpoint of the variable at this position."""
    # Optimizer slots may share a path, so the position makes the name unique. "/" would create folders in the archive.
    return f"{position:05d}:{variable.path.replace('/', '.')}"


def _read_state(path: Location, file: Mapping[str, NDArray[Any]]) -> TrainingState:
    header = parse_json(file[_STATE].tobytes())
    version = header.pop("format_version")
    if version != FORMAT_VERSION:
        raise UnknownFormatError(
            f"checkpoint {path} has format {version!r}, this program reads {FORMAT_VERSION}: start a new run without "
            "training.resume_run"
        )
    known = {each.name for each in fields(TrainingState)}
    return TrainingState(**{name: value for name, value in header.items() if name in known})
