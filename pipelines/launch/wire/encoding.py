"""The encoding of messages as JSON; every protocol has its own kinds of messages."""

import json
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

MAXIMUM_MESSAGE_BYTES = (1 << 22) + (1 << 12)
"""Limit to the bytes of an encoded message."""
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


def _values(message: object) -> dict[str, Any]:
    if not is_dataclass(message):
        raise TypeError(f"Object of type {type(message).__name__} is not JSON serializable")
    return {field.name: getattr(message, field.name) for field in fields(message)}


_ENCODER = json.JSONEncoder(default=_values)


def _build(kind: type, values: dict[str, Any]) -> Any:
    types, built = _types_of(kind), {}
    for name, value in values.items():
        classes = types[name]
        is_message = isinstance(value, dict) and dict not in classes
        built[name] = _build(classes[0], value) if is_message else value
        if not isinstance(built[name], classes):
            raise TypeError(f"{name} is a {type(value).__name__}")
    return kind(**built)


@cache
def _types_of(kind: type) -> dict[str, tuple[type, ...]]:
    """Return the classes that the value of each field may have; the class of a message comes first."""
    return {name: _classes(hint) for name, hint in get_type_hints(kind).items()}


def _classes(hint: Any) -> tuple[type, ...]:
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(get_origin(part) or part for part in parts)
