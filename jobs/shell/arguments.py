"""Parsing of command lines, with hints for mistyped arguments."""

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from conf.keys import paths
from conf.load import shipped_names
from pipelines.scaling.named_link import link_of
from pipelines.storage.locations import local_path

EXIT_CODES = """\
exit codes: 0 done; 2 a mistake in arguments, configuration or data, or a missing package;
            3 an exception in a worker's own code; 4 infrastructure: a lost process, executor, host or server;
            130 interrupted; 1 a bug of groundswell"""
_Value = TypeVar("_Value")
# `section.key=value`, with dashes before it, or without the value.
_SETTING = re.compile(r"^-{0,2}(?P<key>[a-z_]\w*(\.\w+)*)(=(?P<value>.*))?$", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """A parser of one verb's arguments: no abbreviations, and a mistake is a `ValueError`."""

    def __init__(self, verb: str, summary: str) -> None:
        """Make a parser that has only the argument `--result`.

        Args:
            verb: Name of the verb.
            summary: Description of the verb, in a line without a full stop.
        """
        self._arguments: list[argparse.Action] = []
        super().__init__(
            prog=f"groundswell {verb}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument(
            "--result", type=path, metavar="FILE", help="write what came of it to this JSON file, also after a failure"
        )

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument, as argparse does."""
        action = super().add_argument(*names, **options)
        self._arguments.append(action)
        return action

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line, once.

        Raises:
            ValueError: The command line is invalid; the message says what to type instead.
            SystemExit: The user asked for help, which was printed.
        """
        wanted = [action for action in self._arguments if action.required]
        for action in wanted:
            action.required = False  # otherwise a missing argument would hide the reason why it is missing
        arguments, extra = self.parse_known_args(list(argv))
        if extra:
            raise ValueError(self._explain(extra, getattr(arguments, "set", [])))
        for action in wanted:
            if getattr(arguments, action.dest) is None:
                raise ValueError(f"{action.option_strings[0]} {action.metavar} is missing: {action.help}")
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raise the message that argparse would print."""
        raise ValueError(message)

    def _explain(self, extra: Sequence[str], settings: Sequence[str]) -> str:
        """Return what to type instead of the first unknown argument."""
        text = extra[0]
        if settings and "=" not in settings[-1] and not text.startswith("-"):
            return f"--set {settings[-1]} {text}: a setting is one argument, --set {settings[-1]}={text}"
        options = [option for action in self._arguments for option in action.option_strings]
        if "--set" not in options:
            return _unknown(text, options)
        setting = _SETTING.match(text)
        if setting and _looks_like_a_setting(text):
            value = setting["value"] if setting["value"] is not None else " ".join(extra[1:2]) or "VALUE"
            return f"{text}: each setting is given by an argument of its own, --set {setting['key']}={value}"
        if text in shipped_names() or text.endswith((".yaml", ".yml")):
            return f"{text}: a configuration is given as --config {text}"
        if text.startswith("-"):
            name, _, value = text.strip("-").partition("=")
            name = name.replace("-", "_")
            value = value or next((word for word in extra[1:2] if not word.startswith("-")), "VALUE")
            keys = sorted((key for key in paths() if key.endswith(f".{name}")), key=lambda key: key.count("."))
            return f"{text}: a setting is given as --set {keys[0]}={value}" if keys else _unknown(text, options)
        return (
            f"{text!r} is not understood: a setting is one argument, --set section.key=value; quote a value that has "
            "spaces, as in --set 'exchange.codec={name: topk, density: 0.01}'"
        )


def positive(text: str) -> int:
    """Return a whole number above zero, for `add_argument(type=...)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"should be a whole number above 0, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    """Return a number above zero, for `add_argument(type=...)`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"should be a number above 0, got {text!r}")
    return value


def positive_list(text: str) -> list[int]:
    """Return comma-separated whole numbers above zero in rising order, for `add_argument(type=...)`."""
    return sorted({positive(part.strip()) for part in text.split(",")})


def bucket(text: str) -> str:
    """Return a number of MiB above zero, or None for `none`, for `add_argument(type=...)`."""
    if text != "none":
        positive_number(text)
    return text


def _reported(read: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return a function for `add_argument(type=...)`: argparse leaves out the reason of a `ValueError`."""

    def argument(text: str) -> _Value:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


link = _reported(link_of)
"""Reads a speed with an optional latency, for `add_argument(type=...)`."""
path: Callable[[str], Path] = _reported(local_path)
"""Reads a local file or folder, for `add_argument(type=...)`; `locations.local_path` has the spellings."""


def name_or_path(text: str) -> str:
    """Return a name, or a path as `path` does, for `add_argument(type=...)`."""
    found = path(text)
    return text if found == Path(text) else str(found)


def png_file(text: str) -> Path:
    """Return the path of a PNG file in an existing folder, for `add_argument(type=...)`."""
    file = path(text)
    if file.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"should end in .png, got {text!r}")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(file.parent)!r}")
    return file


def _looks_like_a_setting(text: str) -> bool:
    """Return whether a text looks like a key of the configuration: it has a dot, or a value but is no option."""
    is_named_so = "." in text.partition("=")[0] or ("=" in text and not text.startswith("-"))
    return is_named_so and not text.endswith((".yaml", ".yml"))


def _unknown(text: str, options: Sequence[str]) -> str:
    close = difflib.get_close_matches(text.partition("=")[0], options, n=1, cutoff=0.5)
    return f"unknown argument {text}" + (f" (did you mean {close[0]}?)" if close else f"; known: {', '.join(options)}")
