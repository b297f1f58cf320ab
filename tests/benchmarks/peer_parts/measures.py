"""What is measured of a reader, whoever's it is: these functions need NumPy and psutil, and none of our packages.

A reader is an iterator without end of `(rows, labels, images)`: how many rows the batch has, their labels `(batch,
classes)`, and the images by group, `(batch, height, width, bands)`. A row is known by a digest of its pixels. So two
readers, or two runs of one reader, are compared by the bytes that they give.
"""

import hashlib
import json
import math
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

Batches = Iterator[tuple[int, Any, Mapping[str, Any]]]
Steps = Iterator[tuple[Mapping[str, Any], Callable[[], Any]]]
"""One rank's images of each step of one epoch, and what returns the reader's state after that step."""
DESCRIPTION = "description.json"
"""In the folder of all rows: their number, classes, batch size, and the shape of each image group."""


def describe(folder: Path) -> dict[str, Any]:
    """What `write_rows` has written about the rows."""
    description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text())
    description["groups"] = {name: tuple(shape) for name, shape in description["groups"].items()}
    return description


def digest_file(folder: Path) -> Path:
    """The file with the digest of each row, a line each."""
    return folder / "digests.txt"


def digests(images: Mapping[str, Any]) -> list[str]:
    """Each row's digest; the groups are taken by name."""
    groups = [np.ascontiguousarray(np.asarray(images[name]), np.uint16) for name in sorted(images)]
    found = []
    for row in zip(*groups, strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for values in row:
            digest.update(values.data)
        found.append(digest.hexdigest())
    return found


def cpu_seconds() -> float:
    """Processor time of this process and of all that it has started, those that have ended included."""
    process = psutil.Process()
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        try:
            total += sum(each.cpu_times()[:4])  # user, system, and both of children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


def drop_from_memory(folder: Path) -> None:
    """Make the operating system forget all files below a folder."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def entropy(labels: Any, classes: int) -> float:
    """Entropy of the classes of a batch, bits."""
    shares = np.asarray(labels).reshape(-1, classes).mean(axis=0)
    return -math.fsum(share * math.log2(share) for share in shares if share > 0)


def checked(folder: Path, batch: tuple[int, Any, Mapping[str, Any]]) -> dict[str, str]:
    """Dtype and kind of each image group of a batch whose pixels are all rows of the dataset.

    Raises:
        ValueError: A shape or a row is not the dataset's.
    """
    description = describe(folder)
    known = set(digest_file(folder).read_text().split())
    rows, labels, images = batch
    shapes = {name: tuple(values.shape) for name, values in images.items()}
    expected = {name: (rows, *shape) for name, shape in description["groups"].items()}
    if shapes != expected or tuple(np.shape(labels)) != (rows, description["classes"]):
        raise ValueError(f"shapes are {shapes} and {np.shape(labels)}, expected {expected}")
    strange = set(digests(images)) - known
    if strange:
        raise ValueError(f"{len(strange)} of {rows} rows have other pixels than those that were written")
    return {name: f"{type(values).__name__} {values.dtype}" for name, values in images.items()}


def rates(folder: Path, data: Path, make: Callable[[Path], Batches], seconds: float, *, pixels: bool) -> dict[str, Any]:
    """An epoch with nothing in the page cache, an epoch that warms up, then `seconds` of reading.

    The first batch of all is not timed: imports and the start of workers are in it.

    Args:
        folder: Of all rows; has the description.
        data: The reader's own files.
        make: The reader.
        seconds: How long the warm reading takes.
        pixels: Whether the reader gives images that can be checked.
    """
    description = describe(folder)
    classes, steps = description["classes"], description["rows"] // description["batch_size"]
    drop_from_memory(data)
    batches = make(data)
    labels = [np.array(next(batches)[1])]
    started, rows = time.perf_counter(), 0
    for _ in range(steps - 1):
        batch = next(batches)
        rows += batch[0]
        labels.append(np.array(batch[1]))
        del batch
    cold = rows / (time.perf_counter() - started)
    kinds = checked(folder, next(batches)) if pixels else None
    for _ in range(steps - 1):
        next(batches)
    rows, cpu, started = 0, cpu_seconds(), time.perf_counter()
    while time.perf_counter() - started < seconds:
        rows += next(batches)[0]
    wall, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    return {
        "rows_per_second": rows / wall,
        "cpu_seconds_per_1000_rows": 1000 * cpu / rows,
        "cold_rows_per_second": cold,
        "entropy": statistics.mean(entropy(each, classes) for each in labels) if labels[0].size else None,
        "kinds": kinds,
    }


def resume(
    make: Callable[[Path, int, int, Any], Steps], data: Path, save_after: str, state_file: str, new_state_file: str
) -> dict[str, Any]:
    """Digests of this rank's rows by step, up to the epoch's end; rank 0's state is saved after some steps.

    Args:
        make: Gives the steps of a rank, from the number of ranks and a state.
        data: The reader's own files.
        save_after: Number of steps as JSON; null: nothing is saved.
        state_file: The file of the state with which the epoch begins; empty: at its start.
        new_state_file: The file for the state that is saved.
    """
    state = pickle.loads(Path(state_file).read_bytes()) if state_file else None
    rank, found = int(os.environ["RANK"]), []
    for images, state_of_now in make(data, rank, int(os.environ["WORLD_SIZE"]), state):
        found.append(digests(images))
        if len(found) == json.loads(save_after):
            saved = pickle.dumps(state_of_now())
            if rank == 0:
                Path(new_state_file).write_bytes(saved)
    return {"steps": found, "state_bytes": state and state_bytes(state)}


def state_bytes(state: Any) -> int:
    """Bytes of a state as JSON, or pickled where it is not JSON."""
    try:
        return len(json.dumps(state).encode())
    except TypeError:
        return len(pickle.dumps(state))
