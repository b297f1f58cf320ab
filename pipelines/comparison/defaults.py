"""The settings that a run does not have: those without effect, and those of later versions."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from conf.keys import find, nested
from pipelines.comparison.run import DEFAULT_READER, ComparedRun


def with_defaults(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Give runs the default of each setting that only other runs have.

    The default of a new setting is the behaviour of earlier versions. So trainings of two versions are one recipe if
    nothing else differs.

    Args:
        runs: Trainings to compare.
    """
    keys = sorted({key for run in runs for key in run.settings})
    return [run.model_copy(update={"settings": _filled(run.settings, keys)}) for run in runs]


def _filled(settings: dict[str, str], keys: Sequence[str]) -> dict[str, str]:
    named = {key.rpartition(".")[0] for key in settings}
    values = nested(settings)
    filled = {key: DEFAULT_READER[key] for key in keys if key in DEFAULT_READER} | settings
    for key in keys:
        section = key.rpartition(".")[0]
        # A section without any setting was not chosen: another optimizer has other settings.
        if key not in filled and section and section in named and (value := _default(key, values)) is not None:
            filled[key] = value
    return filled


def _default(key: str, settings: Mapping[str, Any]) -> str | None:
    """Return the default as runs store it; None: the chosen sections lack the key, or its absence is a value."""
    field = find(key.split("."), settings)
    if field is None or type(None) in get_args(field.annotation):
        return None
    value = field.get_default(call_default_factory=True)
    return str(value) if isinstance(value, (bool, int, float)) else None
