"""The unfinished dataset: whose it is, and how it becomes the finished one."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.dataset.lease import check_held, lease
from pipelines.dataset.manifest import FILE_NAME, Manifest, read_manifest, write_manifest
from pipelines.dataset.shard import PROGRESS_FOLDER
from pipelines.storage import Folder

_IDENTITY_FILE = f"{PROGRESS_FOLDER}/plan.json"
_ARCHIVE = "the archive's content or settings"


def finished_dataset(dataset: Folder, identity: dict[str, Any]) -> Manifest | None:
    """The manifest of a dataset that is there already; None where there is none, or an unfinished one.

    Raises:
        ValueError: It is something else, or a dataset that another archive or other settings made; names the
            difference.
    """
    if not dataset.exists(FILE_NAME):
        found = dataset.names()
        if (found or (dataset.is_local and dataset.exists())) and PROGRESS_FOLDER not in found:
            raise ValueError(
                f"{dataset} exists and is not a dataset: choose another dataset.path, or remove the folder"
            )
        return None
    manifest = read_manifest(dataset)
    there = {**manifest.settings, "archive": manifest.archive, "source": manifest.source_fingerprint}
    _refuse_another(dataset, there, identity)
    return manifest


def _refuse_another(folder: Folder, there: dict[str, Any], asked: dict[str, Any]) -> None:
    differences = [
        _ARCHIVE if name == "source" else f"{name} {there.get(name)} there, {value} asked for"
        for name, value in asked.items()
        if there.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{folder} was made otherwise ({'; '.join(differences)}): choose another dataset.path, or replace it with "
            "--set prepare.overwrite=true"
        )


@contextmanager
def staging_folder(dataset: Folder, identity: dict[str, Any], splits: list[str], overwrite: bool) -> Iterator[Folder]:
    """Yield where the dataset is written to: this job's alone, with what the same job left there before.

    That is `<dataset>.incomplete` on local disks, and the dataset's own folder elsewhere.

    Raises:
        ValueError: Another archive or other settings made what is there; names the difference.
        RuntimeError: Another job is writing it.
    """
    staging = dataset.sibling(f"{dataset.name}.incomplete") if dataset.is_local else dataset
    with _locked(staging) if dataset.is_local else lease(staging, PROGRESS_FOLDER) as kept:
        if not overwrite and staging.exists(_IDENTITY_FILE):
            _refuse_another(staging, json.loads(staging.read(_IDENTITY_FILE)), identity)
        else:
            # Without its manifest, which goes first, what is left is no dataset.
            for name in sorted(staging.names(), key=lambda name: name != FILE_NAME):
                for path in _files_to_remove(staging, name, kept):
                    staging.remove(path)
        for folder in (*splits, PROGRESS_FOLDER):
            staging.make(folder)
        staging.write(_IDENTITY_FILE, json.dumps(identity).encode())
        yield staging


def _files_to_remove(staging: Folder, name: str, kept: str) -> list[str]:
    """A file or folder, but of a folder with the file `kept` all others in it."""
    if not kept.startswith(f"{name}/"):
        return [name]
    return [path for path in (f"{name}/{inner}" for inner in staging.names(name)) if path != kept]


@contextmanager
def _locked(staging: Folder) -> Iterator[str]:
    """Hold the lock of a local folder; nothing in the folder is part of it."""
    staging.path.parent.mkdir(parents=True, exist_ok=True)
    with staging.path.with_name(f".{staging.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError(f"another job is writing {staging}: wait for it, or stop it") from None
        yield ""
    Path(lock.name).unlink(missing_ok=True)


def finish(staging: Folder, dataset: Folder, manifest: Manifest) -> None:
    """Turn the unfinished dataset into a finished one, at once: by the rename, or else by its `dataset.json`."""
    for split in manifest.splits:
        for name in staging.names(split):
            if name.startswith(".part-"):  # of attempts that were killed
                staging.remove(f"{split}/{name}")
    if staging == dataset:
        check_held(staging, PROGRESS_FOLDER)
    write_manifest(manifest, staging)
    staging.remove(PROGRESS_FOLDER)
    if staging == dataset:
        return
    if dataset.exists():
        replaced = dataset.sibling(f".{dataset.name}.replaced")
        replaced.remove()
        dataset.path.rename(replaced.path)
        staging.path.rename(dataset.path)
        replaced.remove()
    else:
        staging.path.rename(dataset.path)
