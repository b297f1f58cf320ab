"""Explanations of the configuration, from the docstrings of sections and keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from conf.effect import idle_keys
from conf.keys import choice_of, choices, section_of
from conf.load import shipped_names, shipped_text
from conf.notation import text_of
from conf.schema import RunConfig
from conf.sections.section import Section, value_at


def members(path: str) -> dict[str, str]:
    """Return every member of a choice (`archive`, `exchange.codec`) with its class's description, one per line."""
    return {name: _first_line(section) for name, section in choices()[path].members.items()}


def shipped() -> dict[str, str]:
    """Return every shipped configuration with the first line of its comment."""
    return {name: shipped_text(name).splitlines()[0].removeprefix("# ").rstrip(".") for name in shipped_names()}


def to_yaml(config: RunConfig, *, comments: bool = False) -> str:
    """Return the whole configuration as YAML that `load` reads back unchanged.

    If a change of another key made a value ineffective, the value is printed as its default, which `load` accepts.

    Args:
        config: The configuration.
        comments: Whether each key has its description as a comment.
    """
    values = config.model_dump(mode="json")
    for key in idle_keys(config):
        path, _, name = key.rpartition(".")
        inner = values
        for part in path.split("."):
            inner = inner[part]
        inner[name] = value_at(config, path).default(name)
    if not comments:
        return text_of(values, width=1000, allow_unicode=True)
    return "\n".join(_commented(values, RunConfig, "")) + "\n"


def _commented(values: Mapping[str, Any], section: type[Section], indent: str) -> Iterator[str]:
    for key, value in values.items():
        field = section.model_fields[key]
        inner = section_of(field, value)
        text = field.description or ""
        if inner is not None and (choice_of(field) is not None or not text):
            text = _first_line(inner)
        for line in text.splitlines():
            yield f"{indent}# {line.strip()}"
        if inner is not None and isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _commented(value, inner, f"{indent}  ")
        else:
            flow = text_of([value], width=10_000, allow_unicode=True, default_flow_style=True)
            yield f"{indent}{key}: {flow.strip()[1:-1]}"


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0].rstrip(".")
