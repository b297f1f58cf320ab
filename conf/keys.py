"""The keys of the configuration, and the problems of their values.

Keys may depend on a chosen codec, archive, optimizer or network. Each problem is a line: the key, its value and what is
expected.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from conf.schema import RunConfig
from conf.sections.section import Section

TAGS = ("name", "kind")
"""Keys that choose a member of a union."""


@dataclass(frozen=True)
class Choice:
    """A section whose keys depend on one of them, the tag: `exchange.codec`, `archive`."""

    tag: str
    members: dict[str, type[Section]]
    """Section of every value of the tag."""
    default: str | None
    """Default of the tag; None: the user must give one."""


def choice_of(field: FieldInfo) -> Choice | None:
    """Return the choice at a key; None: the key is no choice."""
    sections = list(_sections(field.annotation))
    for tag in TAGS:
        values = [_literals(section, tag) for section in sections]
        # One section with several names is no choice: all names have the same keys.
        if not all(values) or not values or (len(values) == 1 and len(values[0]) > 1):
            continue
        members = {value: section for section, names in zip(sections, values, strict=True) for value in names}
        default = field.get_default(call_default_factory=True)
        return Choice(tag, members, getattr(default, tag, None))
    return None


def section_of(field: FieldInfo, value: object) -> type[Section] | None:
    """Return the section that the value of a key chooses; None: a plain value, or an invalid choice."""
    choice = choice_of(field)
    if choice is None:
        return next(_sections(field.annotation), None)
    name = value.get(choice.tag, choice.default) if isinstance(value, Mapping) else choice.default
    return choice.members.get(name) if isinstance(name, str) else None


def find(path: list[str], values: Mapping[str, Any]) -> FieldInfo | None:
    """Return the key at a path; None: the sections that `values` choose have no such key."""
    return _find(path, values)[0]


def _find(path: list[str], values: Mapping[str, Any]) -> tuple[FieldInfo | None, object]:
    """Return the key at a path, and its value."""
    section: type[Section] | None = RunConfig
    field, value = None, None
    for key in path:
        if section is None or key not in section.model_fields:
            return None, None
        field, value = section.model_fields[key], values.get(key)
        section = section_of(field, value)
        values = value if isinstance(value, Mapping) else {}
    return field, value


def nested(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a run records by key in the form that `find` takes: a mapping per section.

    If a key is recorded as a value, keys within it are left out: a resumed run may have replaced a section by null.
    """
    values: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[name] = value
    return values


def paths() -> list[str]:
    """Return every key that a configuration may have, as `section.key`."""
    return sorted(set(_paths(RunConfig, "")))


def without_tag(key: str) -> str:
    """Return the key of the section that a key chooses (`optimizer` for `optimizer.name`), or the key itself."""
    section, _, tag = key.rpartition(".")
    choice = choices().get(section)
    return section if choice is not None and choice.tag == tag else key


@cache
def choices() -> dict[str, Choice]:
    """Return every choice by its path."""
    found = {path: choice_of(field) for path in paths() if (field := find(path.split("."), {})) is not None}
    return {path: choice for path, choice in found.items() if choice is not None}


def _paths(section: type[Section], prefix: str) -> Iterator[str]:
    for key, field in section.model_fields.items():
        yield f"{prefix}{key}"
        for inner in _sections(field.annotation):
            yield from _paths(inner, f"{prefix}{key}.")


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """Return the sections in an annotation; sections inside lists and mappings are values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) not in (list, dict):
        for argument in get_args(annotation):
            yield from _sections(argument)


def _literals(section: type[Section], tag: str) -> tuple[str, ...]:
    field = section.model_fields.get(tag)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def describe(problem: ErrorDetails, values: Mapping[str, Any]) -> str:
    """Return one of pydantic's problems as a line."""
    path = _path(problem["loc"], values)
    name, keys = _name(path), [str(part) for part in path]
    match problem["type"]:
        case "missing":
            return _missing(keys, values)
        case "extra_forbidden":
            return unknown_key(keys, values)
        case "union_tag_invalid" | "union_tag_not_found":
            return _no_such_member(keys, problem["input"])
        case "model_type" | "model_attributes_type" | "dict_type":
            if name in choices():
                return _no_such_member(keys, problem["input"])
            return f"{name}={problem['input']!r}: {_expected_keys(path, values)}"
        case "value_error":
            return str(problem["ctx"]["error"])
        case _:
            reason = re.sub(r"^(Input|String|List) should", "should", problem["msg"])
            return f"{name}={problem['input']!r}: {reason}"


def unknown_key(path: list[str], values: Mapping[str, Any]) -> str:
    """Return the message for a key that the configuration, or the chosen section, does not have."""
    known = max((length for length in range(1, len(path)) if find(path[:length], values) is not None), default=0)
    name = ".".join(path[: known + 1])
    if not known:
        return f"{name}: unknown section{_hint(path[0], list(RunConfig.model_fields), path)}"
    parent = ".".join(path[:known])
    field, value = _find(path[:known], values)
    assert field is not None
    choice, section = choice_of(field), section_of(field, value)
    if section is None and choice is None:
        return f"{'.'.join(path)}: {parent} is a value, not a section"
    if section is None:
        return _no_such_member(path[:known], value)
    keys = list(section.model_fields)
    if choice is None:
        return f"{name}: unknown key{_hint(path[known], keys, path)}"
    chosen = str(getattr(value, "get", lambda key, default: default)(choice.tag, choice.default))
    keys.remove(choice.tag)
    others = sorted(kind for kind, other in choice.members.items() if path[known] in other.model_fields)
    if others:
        return (
            f"{name}: {parent} is {chosen}, which has no such key; {' and '.join(others)} "
            f"{'has' if len(others) == 1 else 'have'}: choose with {parent}={others[0]}"
        )
    if not keys:
        return f"{name}: unknown key, {parent}={chosen} has none"
    return f"{name}: unknown key of {parent}={chosen}{_hint(path[known], keys, path)}"


def _hint(key: str, known: list[str], path: list[str]) -> str:
    """Return a similar key as a suggestion, else all existing keys."""
    close = difflib.get_close_matches(key, known, n=1)
    if close:
        return f" (did you mean {close[0]}?)"
    if len(path) == 1:
        # The user left out the section.
        full = {name.rpartition(".")[2]: name for name in reversed(paths()) if "." in name}
        close = difflib.get_close_matches(key, full, n=1)
        if close:
            return f" (did you mean {full[close[0]]}?)"
    return f"; expected one of {', '.join(known)}"


def _missing(path: list[str], values: Mapping[str, Any]) -> str:
    field, name = find(path, values), ".".join(path)
    if field is None:  # within a list or a mapping
        return f"{name} is missing"
    choice = choice_of(field)
    if choice is not None:
        return f"{name} is missing: expected {name}={' or '.join(choice.members)}, and its keys"
    return f"{name} is missing{': ' + field.description if field.description else ''}".rstrip(".")


def _no_such_member(path: list[str], value: object) -> str:
    name = ".".join(path)
    choice = choices()[name]
    given = value.get(choice.tag) if isinstance(value, Mapping) else value
    expected = f"should be one of {', '.join(choice.members)}"
    if given is None:
        return f"{name}.{choice.tag}: {expected}"
    folded = {kind.replace("_", ""): kind for kind in choice.members}
    close = difflib.get_close_matches(str(given).lower().replace("_", ""), folded, n=1)
    return f"{name}.{choice.tag}={given!r}: {expected}" + (f" (did you mean {folded[close[0]]}?)" if close else "")


def _expected_keys(path: list[str | int], values: Mapping[str, Any]) -> str:
    """Describe the keys of a section or of a list's elements."""
    field, name = find([part for part in path if isinstance(part, str)], values), _name(path)
    if field is not None and isinstance(path[-1], int):
        (element,) = get_args(field.annotation)
        return f"should be {{{', '.join(f'{key}: ...' for key in element.model_fields)}}}"
    section = section_of(field, None) if field is not None else None
    if section is None:
        return "should be a section with keys"
    return f"{name} is a section: set {', '.join(f'{name}.{key}' for key in section.model_fields)}"


def _path(location: tuple[str | int, ...], values: Mapping[str, Any]) -> list[str | int]:
    """Return the keys on the path to a problem; pydantic's path also has the chosen member of each union."""
    path: list[str | int] = []
    parts = iter(location)
    for part in parts:
        path.append(part)
        field = find([str(key) for key in path], values) if all(isinstance(key, str) for key in path) else None
        choice = choice_of(field) if field is not None else None
        # If all members have one section, pydantic sees no union, and names no member.
        if choice is not None and len({*choice.members.values()}) > 1:
            next(parts, None)
    return path


def _name(path: list[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
