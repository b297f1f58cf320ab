"""JSON from files and servers."""

import json
from typing import Any


def parse_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is no JSON, or its lists and objects are nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists and objects are nested too deeply") from error
