"""From a YAML file and `section.key=value` overrides to a validated `RunConfig`."""

import difflib
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from conf.archives import ARCHIVE_KINDS
from conf.codecs import CODEC_NAMES
from conf.schema import RunConfig


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


def load(name_or_path: str, overrides: list[str] | None = None) -> RunConfig:
    """Read a shipped configuration or a YAML file, apply overrides, validate.

    Args:
        name_or_path: A name from `shipped_names()`, or the path of a YAML file.
        overrides: `section.key=value` each, the value in YAML.

    Raises:
        FileNotFoundError: Neither a shipped name nor a file.
        ValueError: Not YAML, an override of another form, or a key that is unknown, missing, of the wrong type or
            out of range; the message lists each on a line of its own.
    """
    values = _read(name_or_path)
    for override in overrides or []:
        path, separator, text = override.partition("=")
        if not separator or not path:
            raise ValueError(f"--set {override!r} is not of the form section.key=value")
        _set(values, path, _parse(text, f"--set {override}"))
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_describe(problem) for problem in error.errors())
        raise ValueError(f"config {name_or_path}: {problems}") from None


def _read(name_or_path: str) -> dict[str, Any]:
    shipped = shipped_names()
    if name_or_path in shipped:
        text = files("conf").joinpath(f"{name_or_path}.yaml").read_text()
    elif Path(name_or_path).is_file():
        text = Path(name_or_path).read_text()
    else:
        raise FileNotFoundError(
            f"config {name_or_path!r} is neither a YAML file nor one of the shipped ones: {', '.join(shipped)}"
        )
    values = _parse(text, f"config {name_or_path}")
    if not isinstance(values, dict):
        raise ValueError(f"config {name_or_path}: expected sections of keys, got {type(values).__name__}")
    return values


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not YAML: {' '.join(str(error).split())}") from None


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {path}: {section!r} is a value, not a section")
    values[key] = value


def _describe(problem: Any) -> str:
    # Below `archive` and `exchange.codec` the location also names the kind, which is no key.
    location = [str(part) for part in problem["loc"] if part not in (*ARCHIVE_KINDS, *CODEC_NAMES)]
    where = ".".join(location)
    match problem["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(location[-1], _keys(location[:-1]), n=1)
            return f"{where}: unknown key" + (f" (did you mean {close[0]}?)" if close else "")
        case "missing":
            return f"{where}: missing"
        case "union_tag_invalid" | "union_tag_not_found":
            key, names = ("name", CODEC_NAMES) if location[0] == "exchange" else ("kind", ARCHIVE_KINDS)
            return f"{where}.{key}: should be one of {', '.join(names)}"
        case "value_error":
            return str(problem["ctx"]["error"])
        case _:
            reason = problem["msg"].replace("Input should be", "should be")
            return f"{where}={problem['input']!r}: {reason}"


def _keys(sections: list[str]) -> list[str]:
    models: list[Any] = [RunConfig]
    for section in sections:
        annotations = [model.model_fields[section].annotation for model in models if section in model.model_fields]
        models = [kind for annotation in annotations for kind in get_args(annotation) or [annotation]]
        models = [kind for kind in models if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return [key for model in models for key in model.model_fields]
