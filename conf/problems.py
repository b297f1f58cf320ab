"""The problems of a configuration, a line for each: the key, its value and what is expected."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import ErrorDetails

from conf.keys import choice_of, choices, find, paths, section_of
from conf.schema import RunConfig
from conf.sections.section import Section


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
    known = len(path) - 1
    while known and find(path[:known], values) is None:
        known -= 1
    name = ".".join(path[: known + 1])
    if not known:
        return f"{name}: unknown section{_hint(path[0], list(RunConfig.model_fields), path)}"
    parent = ".".join(path[:known])
    field = find(path[:known], values)
    assert field is not None
    value = _at(path[:known], values)
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
    if path and isinstance(path[-1], int):
        field = find([str(part) for part in path[:-1]], values)
        element = getattr(field.annotation, "__args__", [None])[0] if field is not None else None
        keys = list(element.model_fields) if isinstance(element, type) and issubclass(element, Section) else []
        return f"should be {{{', '.join(f'{key}: ...' for key in keys)}}}"
    field = find([str(part) for part in path], values)
    section = section_of(field, None) if field is not None else None
    if section is None:
        return "should be a section with keys"
    name = _name(path)
    return f"{name} is a section: set {', '.join(f'{name}.{key}' for key in section.model_fields)}"


def _path(location: tuple[str | int, ...], values: Mapping[str, Any]) -> list[str | int]:
    """Return the keys on the path to a problem; pydantic's path also has the chosen member of each union."""
    path: list[str | int] = []
    skip = False
    for part in location:
        if skip:
            skip = False
            continue
        path.append(part)
        field = find([str(key) for key in path], values) if all(isinstance(key, str) for key in path) else None
        choice = choice_of(field) if field is not None else None
        skip = choice is not None and choice.is_union
    return path


def _at(path: list[str], values: Mapping[str, Any]) -> object:
    value: object = values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _name(path: list[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
