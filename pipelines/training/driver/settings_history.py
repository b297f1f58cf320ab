"""Which settings of a run have changed, and from which step on: the store's parameters of a run cannot change."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store import revision
from pipelines.tracking.store.recorded import CHANGED_PREFIX, NOT_SET

FILE_NAME = "settings.json"
"""File in a run's folder: the settings that hold, the changes so far, and which version of the package wrote them."""
_NEVER_A_CHANGE = (
    "training.resume_run",
    "training.output",
    "training.trace_steps",
    "training.tensorflow_profiler",
    "dataset.path",
    "tracking.offline",
)


def begin(folder: Path, settings: Mapping[str, str]) -> None:
    """Note the settings with which a run begins."""
    _write(folder, settings, [])


def record_changes(writer: RunWriter, folder: Path, settings: Mapping[str, str], step: int) -> None:
    """Write to the run which settings differ from those so far.

    Args:
        writer: Writes to the run.
        folder: The run's folder.
        settings: All settings that hold from now on, by key.
        step: Optimizer steps that were taken with the settings so far.

    Raises:
        FileNotFoundError: The folder does not say its settings so far.
    """
    before, history, has_all = _read(folder)
    # Another version of the package may have settings of its own, which nobody has changed.
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
    _write(folder, settings, history)


def now(folder: Path) -> dict[str, str]:
    """Return the settings that hold.

    Raises:
        FileNotFoundError: The folder does not say them.
    """
    return _read(folder)[0]


def _texts(history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The values of each changed setting after the first one: `0.5 from step 16, 0.1 from step 24`."""
    kept: dict[str, list[Mapping[str, Any]]] = {}
    for change in history:
        # No step that counts was taken with a value that was changed again before the next checkpoint.
        values = [other for other in kept.get(change["setting"], []) if other["step"] < change["step"]]
        if not values or values[-1]["after"] != change["after"]:
            values.append(change)
        kept[change["setting"]] = values
    return {
        key: ", ".join(f"{change['after']} from step {change['step']}" for change in changes)
        for key, changes in kept.items()
    }


def _read(folder: Path) -> tuple[dict[str, str], list[dict[str, Any]], bool]:
    """The settings so far, the changes, and whether this version of the package wrote them."""
    values: dict[str, Any] = json.loads((folder / FILE_NAME).read_text())
    return values["now"], values["changes"], values["version"] == revision.package_version()


def _write(folder: Path, settings: Mapping[str, str], changes: Sequence[Mapping[str, Any]]) -> None:
    values = {"version": revision.package_version(), "now": dict(settings), "changes": list(changes)}
    temporary = folder / f".{FILE_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(values, indent=1))
    temporary.replace(folder / FILE_NAME)
