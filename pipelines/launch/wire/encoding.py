"""The encoding of messages as JSON; every protocol has its own kinds of messages."""

import json
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


def encode(message: object, number: int = 0) -> bytes:
    """Return a message as JSON; `number` is its position among those that its sender counts, from 1.

    Raises:
        TypeError: A field contains a value that JSON cannot represent.
    """
    return _ENCODER.encode([type(message).__name__, number, vars(message)]).encode()


class MessageKinds(Generic[Kind]):
    """The messages that one end of a protocol accepts: dataclasses whose fields JSON can represent."""

    def __init__(self, *kinds: type[Kind]) -> None:
        """Accept these classes."""
        self._kinds = {kind.__name__: kind for kind in kinds}

    def decode(self, data: bytes) -> tuple[Kind, int]:
        """Return a message and its number.

        Raises:
            ValueError: The data is not one of these messages, or a field has another type.
        """
        try:
            name, number, values = json.loads(data.decode())
            return _build(self._kinds[name], values), int(number)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{data[:80]!r} is no message of this connection") from error


class _FieldType(NamedTuple):
    """The values that a field may have."""

    classes: tuple[type, ...]
    message: Any
    """The dataclass among them; None: there is none."""


def _values(message: object) -> dict[str, Any]:
    if not is_dataclass(message):
        raise TypeError(f"Object of type {type(message).__name__} is not JSON serializable")
    return {field.name: getattr(message, field.name) for field in fields(message)}


_ENCODER = json.JSONEncoder(default=_values)


def _build(kind: Any, values: dict[str, Any]) -> Any:
    types, built = _types_of(kind), {}
    for name, value in values.items():
        classes, message = types[name]
        built[name] = value if message is None or value is None else _build(message, value)
        if not isinstance(built[name], classes):
            raise TypeError(f"{name} is a {type(value).__name__}")
    return kind(**built)


@cache
def _types_of(kind: type) -> dict[str, _FieldType]:
    """Return the types of the fields by name."""
    hints = get_type_hints(kind)
    return {field.name: _type_of(hints[field.name]) for field in fields(kind)}


def _type_of(hint: Any) -> _FieldType:
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    classes = tuple(get_origin(part) or part for part in parts)
    return _FieldType(classes, next(filter(is_dataclass, classes), None))
