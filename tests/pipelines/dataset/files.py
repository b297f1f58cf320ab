"""Files of a dataset, as several tests look at them, damage them and make them."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from pipelines.archives.bigearthnet.v2 import BigEarthNetV2
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.prepare.writer import prepare_dataset
from pipelines.storage.folder import Location
from tests.patience import wait_until

DATA = (".parquet", "dataset.json")
"""How the files end that are the same wherever a dataset was prepared from the same samples."""


def content(dataset: str | Path | Location, endings: str | tuple[str, ...] = "") -> dict[str, str]:
    """Digest of every file of a dataset, or of those whose names end so."""
    folder = Location.at(dataset)
    return {
        name: hashlib.sha256(folder.read(name)).hexdigest() for name in sorted(folder.files()) if name.endswith(endings)
    }


def upload(root: Path, url: str) -> str:
    """Have the files of a folder behind a URL."""
    for path in sorted(root.rglob("*")):
        if path.is_file():
            Location.at(url).write(str(path.relative_to(root)), path.read_bytes())
    return url


def flip_bit(path: Path, place: int, bit: int = 1) -> None:
    """Change one bit of a byte of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ bit]))


def shorten(path: Path) -> None:
    """Cut off the end of a file."""
    os.truncate(path, path.stat().st_size - 100)


def blank(path: Path) -> None:
    """Put zeros in place of the content of a file."""
    path.write_bytes(bytes(path.stat().st_size))


def prepare(spark: SparkSession, root: str | Path, dataset: str | Path, **settings: object) -> Manifest:
    """Prepare a BigEarthNet as `small_dataset` is prepared."""
    values = {"row_group_mib": 1, "row_groups_per_shard": 2, "seed": 3, **settings}
    return prepare_dataset(spark, BigEarthNetV2(str(root)), dataset, **values)  # type: ignore[arg-type]


def kill_preparation(root: Path, dataset: str | Path, is_time: Callable[[], bool]) -> None:
    """Start the command as `prepare` prepares, and kill its driver as soon as it is time."""
    command = [
        sys.executable, "-m", "jobs.shell.cli", "prepare", "--config", "smoke",
        "--set", f"archive.root={root}", "--set", f"dataset.path={dataset}",
        "--set", "prepare.row_group_mib=1", "--set", "prepare.row_groups_per_shard=2", "--set", "prepare.seed=3",
        "--set", "launch.master=local[1]",
    ]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_time() or process.poll() is not None, 200, every=0.005)
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
