"""The history of a run's changed settings by step, because the store's parameters of a run cannot change."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.machine.json_text import parse_json
from pipelines.storage.whole_files import new_file
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store import revision
from pipelines.tracking.store.recorded import CHANGED_PREFIX, NOT_SET

FILE_NAME = "settings.json"
"""A file in a run's folder with the current settings, the changes so far, and the package version that wrote it."""
_NEVER_A_CHANGE = (
    "training.resume_run",
    "training.output",
    "training.trace_steps",
    "training.tensorflow_profiler",
    "dataset.path",
    "tracking.offline",
)


def record_changes(writer: RunWriter, folder: Path, settings: Mapping[str, str], step: int) -> None:
    """Write to the run which settings differ from the previous ones.

    Args:
        writer: The run's writer.
        folder: The run's folder.
        settings: All settings from now on, by key.
        step: Number of optimizer steps with the previous settings.

    Raises:
        FileNotFoundError: The folder does not contain the previous settings.
    """
    before, history, has_all = _read(folder)
    # Another package version may have additional settings, which the user has not changed.
    keys = settings.keys() | before.keys() if has_all else settings.keys() & before.keys()
    changes = [
        {"step": step, "setting": key, "before": before.get(key, NOT_SET), "after": settings.get(key, NOT_SET)}
        for key in sorted(keys - set(_NEVER_A_CHANGE))
        if settings.get(key, NOT_SET) != before.get(key, NOT_SET)
    ]
    history = [*history, *changes]
    changed = {change["setting"] for change in changes}
    if changes:
        writer.tags({f"{CHANGED_PREFIX}{key}": text for key, text in _texts(history).items() if key in changed})
    if history:
        writer.table(history, "settings_history.json")
    write(folder, settings, history)


def now(folder: Path) -> dict[str, str]:
    """Return the current settings.

    Raises:
        FileNotFoundError: The folder does not contain them.
    """
    return _read(folder)[0]


def _texts(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the later values of each changed setting: `0.5 from step 16, 0.1 from step 24`."""
    later: dict[str, list[Mapping[str, Any]]] = {}
    for change in history:
        # If a value was changed again before the next checkpoint, no remaining step used it.
        values = [other for other in later.get(change["setting"], []) if other["step"] < change["step"]]
        if not values or values[-1]["after"] != change["after"]:
            values.append(change)
        later[change["setting"]] = values
    return {
        key: ", ".join(f"{change['after']} from step {change['step']}" for change in changes)
        for key, changes in later.items()
    }


def _read(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]], bool]:
    """Return the settings, the changes, and whether this version of the package wrote them."""
    values: dict[str, Any] = parse_json((folder / FILE_NAME).read_text())
    return values["now"], values["changes"], values["version"] == revision.package_version()


def write(folder: Path, settings: Mapping[str, str], changes: Sequence[Mapping[str, Any]] = ()) -> None:
    """Write the current settings of a run, and the changes so far; a new run has none."""
    values = {"version": revision.package_version(), "now": dict(settings), "changes": list(changes)}
    with new_file(folder / FILE_NAME, flush=False) as path:
        path.write_text(json.dumps(values, indent=1))
