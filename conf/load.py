"""Loading of a validated `RunConfig` from a YAML file, `section.key=value` settings and sections of values."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from conf.changes import changed, given, keys_in, validated
from conf.effect import refuse_idle
from conf.notation import parse
from conf.schema import RunConfig


def shipped_names() -> list[str]:
    """Return the names of the configurations that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files("conf").iterdir() if p.name.endswith(".yaml"))


def shipped_text(name: str) -> str:
    """Return the YAML of a shipped configuration."""
    return files("conf").joinpath(f"{name}.yaml").read_text()


def load(name_or_path: str | None, settings: Sequence[str] = (), **sections: Any) -> RunConfig:
    """Read a shipped configuration or a YAML file, apply changes, validate.

    A setting that chooses another codec, archive, optimizer or network than the file (`optimizer=sgd`, or
    `optimizer.name=sgd`) replaces the file's section. Settings of its keys may come before or after it.

    Args:
        name_or_path: A name from `shipped_names()`, or the path of a YAML file; None: the defaults alone.
        settings: `section.key=value` each, the value in YAML; the last one of a key counts.
        sections: Changes by section, as Python's values: `training={"epochs": 3}`. They come after `settings`.

    Raises:
        FileNotFoundError: The argument is neither a shipped name nor a file.
        ValueError: The file is not YAML, or a setting has another form. Or a key is unknown, missing, of the wrong
            type, out of range or without effect. Each problem is a line.
    """
    config = resolve(name_or_path, settings, **sections)
    refuse_idle(config, base_of(name_or_path), [*keys_of(settings), *keys_in(sections)], _where(name_or_path))
    return config


def resolve(name_or_path: str | None, settings: Sequence[str] = (), **sections: Any) -> RunConfig:
    """Load as `load` does, but accept settings without effect: those of a recorded run or of a grid."""
    values = {} if name_or_path is None else _read(name_or_path)
    return validated(changed(values, settings, sections), _where(name_or_path))


def override(config: RunConfig, *settings: str, **sections: Any) -> RunConfig:
    """Return a configuration with changes, validated as a whole.

    Args:
        config: The configuration.
        settings: `section.key=value` each, as after `--set`: `override(config, "training.epochs=3")`.
        sections: Changes by section, as Python's values: `override(config, training={"epochs": 3})`.

    Raises:
        ValueError: A key is unknown, of the wrong type, out of range or without effect, or the sections do not fit
            together.
    """
    made = validated(changed(given(config), settings, sections), "override: ")
    refuse_idle(made, None, [*keys_of(settings), *keys_in(sections)], "override: ")
    return made


def base_of(name_or_path: str | None) -> RunConfig | None:
    """Return a configuration or file without further settings; None: it is incomplete without them."""
    try:
        return resolve(name_or_path)
    except ValueError:
        return None


def keys_of(settings: Sequence[str]) -> list[str]:
    """Return the keys that settings name."""
    return [setting.partition("=")[0] for setting in settings]


def _where(name_or_path: str | None) -> str:
    return "" if name_or_path is None else f"config {name_or_path}: "


def _read(name_or_path: str) -> dict[str, Any]:
    shipped = shipped_names()
    if name_or_path in shipped:
        text = shipped_text(name_or_path)
    elif Path(name_or_path).is_file():
        try:
            text = Path(name_or_path).read_text()
        except UnicodeDecodeError:
            raise ValueError(f"config {name_or_path}: not a text file") from None
    else:
        raise FileNotFoundError(
            f"config {name_or_path!r} is neither a YAML file nor one of the shipped ones: {', '.join(shipped)}"
        )
    values = parse(text, f"config {name_or_path}")
    if not isinstance(values, dict):
        raise ValueError(f"config {name_or_path}: expected sections of keys, got {type(values).__name__}")
    return values
