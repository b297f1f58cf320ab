"""Loading of a validated `RunConfig` from a YAML file.

Its values are changed by texts (`section.key=value`) or by sections of values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from conf.effect import refuse_idle
from conf.keys import TAGS, choice_of, describe, find, section_of, unknown_key
from conf.notation import parse
from conf.schema import RunConfig
from conf.sections.section import Section

_COMMENT = re.compile(r"\s#")
_NULL = ("~", "null", "Null", "NULL")


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
    refuse_idle(config, base_of(name_or_path), [*keys_of(settings), *dict(flat(sections))], _where(name_or_path))
    return config


def resolve(
    name_or_path: str | None, settings: Sequence[str] = (), *, option: str = "--set ", **sections: Any
) -> RunConfig:
    """Load as `load` does, but accept settings without effect: those of a recorded run or of a grid.

    A message about one of the settings begins with `option`, and not with the name of the file.
    """
    values = {} if name_or_path is None else _read(name_or_path)
    return validated(changed(values, settings, sections), _where(name_or_path), keys_of(settings), option)


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
    refuse_idle(made, None, [*keys_of(settings), *dict(flat(sections))], "override: ")
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
    if name_or_path not in shipped and not Path(name_or_path).is_file():
        raise FileNotFoundError(
            f"config {name_or_path!r} is neither a YAML file nor one of the shipped ones: {', '.join(shipped)}"
        )
    content = shipped_text(name_or_path) if name_or_path in shipped else Path(name_or_path).read_bytes()
    values = parse(content, f"config {name_or_path}")
    if not isinstance(values, dict):
        raise ValueError(f"config {name_or_path}: expected sections of keys, got {type(values).__name__}")
    return values


def changed(values: Mapping[str, Any], settings: Sequence[str], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to the values of a configuration, and return the values; only the keys are validated.

    A change that chooses another codec, archive, optimizer or network replaces the whole section.

    Args:
        values: Values by section, as in a YAML file; the function may modify them.
        settings: `section.key=value` each, the value in YAML; the last one of a key counts.
        sections: New values by name of the section: a mapping of the keys that change, a whole section, or a value.

    Raises:
        ValueError: A setting has another form, or its key does not exist.
    """
    found = _with_tags(values, RunConfig)
    chosen = [_split(setting, found) for setting in settings]
    # The key that chooses the kind of a section comes before the section's other keys.
    for path, text in sorted(chosen, key=lambda setting: len(setting[0])):
        field = _field(list(path), found)
        _set(found, list(path), _value(text, field, f"--set {'.'.join(path)}={text}"))
        found = _with_tags(found, RunConfig)
    for name, value in sections.items():
        _merge(found, [name], value)
        found = _with_tags(found, RunConfig)
    return found


def given(section: Section) -> dict[str, Any]:
    """Return the values of a configuration or section that are not defaults, and the kind of every section."""
    values: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section) and key in section.model_fields_set:
            values[key] = given(value)
        elif key in section.model_fields_set or key in TAGS:
            values |= section.model_dump(include={key})
    return values


def validated(values: Mapping[str, Any], where: str, given: Sequence[str] = (), option: str = "--set ") -> RunConfig:
    """Make the configuration.

    Args:
        values: Values by section.
        where: First words of an error message.
        given: Keys that settings have changed.
        option: First words of a message about one of these.

    Raises:
        ValueError: A key is unknown, missing, of the wrong type or out of range; each problem is a line.
    """
    keys = tuple(key + end for key in given for end in ".:=[")
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [describe(problem, values) for problem in error.errors()]
        is_given = [line.startswith(keys) and " is missing" not in line for line in lines]
        problems = [option * named + line for line, named in zip(lines, is_given, strict=True)]
        if len(problems) > 1:
            problems = [f"{len(problems)} problems", *problems]
        raise ValueError(where * (is_given != [True]) + "\n  ".join(problems)) from None


def flat(sections: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values of sections with their keys, as `section.key`."""
    for name, value in sections.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _with_tags(values: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Return the values; a name alone becomes a section of that name, and a section without name gets the default."""
    full = dict(values)
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None:
            continue
        choice = choice_of(field)
        if choice is not None and isinstance(value, str):
            full[key] = value = {choice.tag: value}
        inner = section_of(field, value)
        if inner is not None and isinstance(value, Mapping):
            full[key] = _with_tags(value, inner)
            if choice is not None and choice.default is not None:
                full[key] = {choice.tag: choice.default, **full[key]}
    return full


def _split(setting: str, values: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Return path and value of a setting; the path of a tag becomes that of its choice."""
    name, separator, text = setting.partition("=")
    path = tuple(name.strip().split("."))
    if not separator or not all(path):
        raise ValueError(f"--set {setting!r} is not of the form section.key=value")
    field = find(list(path[:-1]), values)
    choice = choice_of(field) if field is not None else None
    return (path[:-1] if choice is not None and path[-1] == choice.tag else path), text


def _field(path: list[str], values: Mapping[str, Any]) -> FieldInfo:
    field = find(path, values)
    if field is None:
        raise ValueError(unknown_key(path, values))
    return field


def _merge(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a key; a mapping for a section changes the keys that it names."""
    field = _field(path, values)
    choice = choice_of(field)
    if not isinstance(value, Mapping) or (choice is None and section_of(field, None) is None):
        _set(values, path, value.model_dump() if isinstance(value, Section) else value)
        return
    if choice is not None and choice.tag in value:  # it says which kind the other keys belong to
        _set(values, path, value[choice.tag])
    for key, inner in value.items():
        if choice is None or key != choice.tag:
            _merge(values, [*path, key], inner)


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    choice = choice_of(_field(path, values))
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ValueError(f"{'.'.join(path)}: {key} is a section of keys, and its value is {values!r}")
    key = path[-1]
    if choice is not None and isinstance(value, str):
        current = values.get(key, {})
        same = isinstance(current, Mapping) and current.get(choice.tag, choice.default) == value
        value = {**current, choice.tag: value} if same else {choice.tag: value}
    values[key] = value


def _value(text: str, field: FieldInfo, where: str) -> Any:
    """Return the value of a setting: YAML, but if the key takes texts, everything except null is a text.

    In such a text, ` #` is part of the text, because folders have such names; in a file it begins a comment. If the key
    takes any text, `~` is the home folder, not null.
    """
    kinds = list(_plain_types(field.annotation))
    value = parse(text, where)
    if not kinds or not set(kinds) <= {str, type(None)}:
        return value
    if not isinstance(value, str):
        is_null = value is None and text.strip() in _NULL
        is_home = text.strip() == "~" and str in (field.annotation, *get_args(field.annotation))
        return None if is_null and type(None) in kinds and not is_home else text
    return text.strip() if _COMMENT.search(text) and text.lstrip()[0] not in "'\"" else value


def _plain_types(annotation: Any) -> list[type]:
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    if get_origin(annotation) in (list, dict) or not get_args(annotation):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _plain_types(argument)]
