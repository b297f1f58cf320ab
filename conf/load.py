"""From a YAML file and `section.key=value` settings to a validated `RunConfig`."""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from conf.keys import choice_of, find, section_of
from conf.problems import describe, unknown_key
from conf.schema import RunConfig
from conf.section import Section


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but `1e-4` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def shipped_names() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files("conf").iterdir() if p.name.endswith(".yaml"))


def shipped_text(name: str) -> str:
    """The YAML of a shipped configuration."""
    return files("conf").joinpath(f"{name}.yaml").read_text()


def load(name_or_path: str, settings: Sequence[str] = ()) -> RunConfig:
    """Read a shipped configuration or a YAML file, apply settings, validate.

    A setting that chooses a codec, archive, optimizer or network (`optimizer=sgd`, or `optimizer.name=sgd`) replaces
    the file's section, unless the file has the same one; settings of its keys may come before or after it.

    Args:
        name_or_path: A name from `shipped_names()`, or the path of a YAML file.
        settings: `section.key=value` each, the value in YAML; the last one of a key counts.

    Raises:
        FileNotFoundError: Neither a shipped name nor a file.
        ValueError: Not YAML, a setting of another form, or a key that is unknown, missing, of the wrong type or out
            of range; each problem is a line.
    """
    values = _with_tags(_read(name_or_path), RunConfig)
    chosen = [_split(setting, values) for setting in settings]
    # What chooses the keys of a section comes before them.
    for path, text in sorted(chosen, key=lambda setting: len(setting[0])):
        _set(values, list(path), text)
        values = _with_tags(values, RunConfig)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = [line for problem in error.errors() for line in describe(problem, values)]
        lines = "\n  ".join([f"{len(problems)} problems", *problems] if len(problems) > 1 else problems)
        raise ValueError(f"config {name_or_path}: {lines}") from None


def keys_of(settings: Sequence[str]) -> list[str]:
    """The keys that settings name."""
    return [setting.partition("=")[0] for setting in settings]


def parse(text: str, where: str) -> Any:
    """Parse YAML.

    Raises:
        ValueError: It is none; says where.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{where}: not YAML{place}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


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


def _with_tags(values: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """The values, where a name alone stands for a section of that name, and a section without name has the default."""
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
    """Path and value of a setting; the tag of a choice as the choice itself."""
    name, separator, text = setting.partition("=")
    path = tuple(name.strip().split("."))
    if not separator or not all(path):
        raise ValueError(f"--set {setting!r} is not of the form section.key=value")
    field = find(list(path[:-1]), values)
    choice = choice_of(field) if field is not None else None
    return (path[:-1] if choice is not None and path[-1] == choice.tag else path), text


def _set(values: dict[str, Any], path: list[str], text: str) -> None:
    field = find(path, values)
    if field is None:
        raise ValueError(unknown_key(path, values))
    value = _value(text, field, f"--set {'.'.join(path)}={text}")
    choice = choice_of(field)
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
    """The value of a setting: YAML, but what is neither a text nor null in YAML is a text where the key takes texts."""
    kinds = list(_plain_types(field.annotation))
    value = parse(text, where)
    if not isinstance(value, str) and kinds and set(kinds) <= {str, type(None)}:
        return None if value is None and text and type(None) in kinds else text
    return value


def _plain_types(annotation: Any) -> list[type]:
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    if get_origin(annotation) in (list, dict) or not get_args(annotation):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _plain_types(argument)]
