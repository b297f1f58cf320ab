"""Text from files, servers and other processes, as a terminal, a log or a page may show it."""

import html
import io
import logging
import os
import re
import select
import sys
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


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural: `1 slot`, `2 epochs`, `2 classes`."""
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def cell(value: Any) -> Any:
    """Return a value for CSV: a spreadsheet reads no text as a formula, also where a sign has its full width."""
    if not isinstance(value, str):
        return value
    return printable(f"'{value}" if _FORMULA.match(unicodedata.normalize("NFKC", value)) else value)


class LossyFile(io.FileIO):
    """Output that may be lost without ending the job: its reader has left, or its disk is full."""

    lost: OSError | None = None
    """The error that lost a text; None: everything is written."""

    def write(self, data: Any) -> int:
        """Write bytes and return their number, also if they are lost."""
        try:
            while (written := super().write(data)) is None:  # a pipe that does not block is full
                select.select([], [self], [])
        except OSError as error:
            self.lost, written = error, len(data)
        return written


def print_lossily(name: str) -> LossyFile | None:
    """Let an error of `stdout` or `stderr` not end this process; return its file.

    A text that the encoding lacks is escaped. The stream of a notebook or another program is left as it is: None.
    """
    stream = getattr(sys, name)
    if stream is not getattr(sys, f"__{name}__"):
        return None
    # A closed descriptor must not become that of another file, which would then get the output.
    file = LossyFile(os.open(os.devnull, os.O_RDWR) if stream is None else stream.fileno(), "w", closefd=False)
    encoding = getattr(stream, "encoding", None)
    setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=True))
    return file


class PrintableFormatter(logging.Formatter):
    """Formats log records as printable text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return printable(super().format(record))
