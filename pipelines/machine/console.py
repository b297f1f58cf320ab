"""Text from files, servers and other processes, as a terminal, a log or a page may show it."""

import html
import logging
import re
import unicodedata
from typing import Any

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Control characters move a terminal's cursor and set its title; bidirectional marks show a text in another order.
# What stands for undecodable bytes (surrogates) has no encoding.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_FORMULA = re.compile(r"\s*([=@]|[+-](?!\.?\d[\d.]*(e[+-]?\d+)?$))", re.IGNORECASE)


def printable(text: str) -> str:
    """Return a text without colours; other control characters and bidirectional marks are escaped, as in Python."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), _COLOUR.sub("", text))


def escape(text: str) -> str:
    """Return a printable text for HTML."""
    return html.escape(printable(text))


def cell(value: Any) -> Any:
    """Return a value for CSV: a spreadsheet reads no text as a formula, also where a sign has its full width."""
    if not isinstance(value, str):
        return value
    return printable(f"'{value}" if _FORMULA.match(unicodedata.normalize("NFKC", value)) else value)


class PrintableFormatter(logging.Formatter):
    """Formats log records as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return printable(super().format(record))
