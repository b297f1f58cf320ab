"""The keys of the configuration, and those of a chosen codec, archive, optimizer or network."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

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

    @property
    def is_union(self) -> bool:
        """Whether pydantic distinguishes the members, and therefore names the member in the locations of its errors."""
        return len(set(self.members.values())) > 1


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
    section: type[Section] | None = RunConfig
    field = None
    for key in path:
        if section is None or key not in section.model_fields:
            return None
        field = section.model_fields[key]
        value = values.get(key)
        section = section_of(field, value)
        values = value if isinstance(value, Mapping) else {}
    return field


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
