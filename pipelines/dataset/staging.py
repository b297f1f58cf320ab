"""The unfinished dataset beside the finished one: whose it is, and how one becomes the other."""

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.dataset.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from pipelines.dataset.shard import PROGRESS_FOLDER

_IDENTITY_FILE = "plan.json"
_ARCHIVE = "the archive's content or settings"


def finished_dataset(dataset: Path, identity: dict[str, Any]) -> Manifest:
    """The manifest of a dataset that is there already.

    Raises:
        ValueError: It is no dataset, or one that another archive or other settings made; names the difference.
    """
    if not (dataset / FILE_NAME).is_file():
        raise ValueError(f"{dataset} exists and is not a dataset: choose another dataset.path, or remove the folder")
    manifest = read_manifest(dataset)
    there = {**manifest.settings, "archive": manifest.archive, "source": manifest.source_fingerprint}
    _refuse_another(dataset, there, identity)
    return manifest


def _refuse_another(path: Path, there: dict[str, Any], asked: dict[str, Any]) -> None:
    differences = [
        _ARCHIVE if name == "source" else f"{name} {there.get(name)} there, {value} asked for"
        for name, value in asked.items()
        if there.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{path} was made otherwise ({'; '.join(differences)}): choose another dataset.path, or replace it with "
            "--set prepare.overwrite=true"
        )


@contextmanager
def staging_folder(staging: Path, identity: dict[str, Any], splits: list[str], overwrite: bool) -> Iterator[None]:
    """The unfinished dataset: this job's alone, of the same archive and settings as before if it was there.

    Raises:
        ValueError: Another archive or other settings made what is there; names the difference.
        RuntimeError: Another job is writing it.
    """
    staging.parent.mkdir(parents=True, exist_ok=True)
    with staging.with_name(f".{staging.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"another job is writing {staging}: wait for it, or stop it") from None
        plan = staging / PROGRESS_FOLDER / _IDENTITY_FILE
        if plan.is_file() and not overwrite:
            _refuse_another(staging, json.loads(plan.read_text()), identity)
        elif staging.exists():
            shutil.rmtree(staging)
        for folder in (*splits, PROGRESS_FOLDER):
            (staging / folder).mkdir(parents=True, exist_ok=True)
        plan.write_text(json.dumps(identity))
        yield
    Path(lock.name).unlink(missing_ok=True)


def finish(staging: Path, dataset: Path, manifest: Manifest) -> None:
    """Turn the unfinished dataset into a finished one; the rename is the moment at which it exists."""
    for split in manifest.splits:
        for leftover in (staging / split).glob(".part-*"):  # of attempts that were killed
            leftover.unlink(missing_ok=True)
    write_manifest(manifest, staging)
    shutil.rmtree(staging / PROGRESS_FOLDER)
    if dataset.exists():
        replaced = dataset.with_name(f".{dataset.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        dataset.rename(replaced)
        staging.rename(dataset)
        shutil.rmtree(replaced)
    else:
        staging.rename(dataset)
