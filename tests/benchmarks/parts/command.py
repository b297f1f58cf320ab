"""The command line that every benchmark has."""

import argparse
import signal
import sys


def command(text: str | None, smoke: str) -> argparse.ArgumentParser:
    """The arguments of a benchmark: its text, and `--smoke`, which says what is left of it."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def is_smoke(text: str | None, smoke: str) -> bool:
    """Whether this is a smoke run, where the benchmark has no other argument."""
    return bool(command(text, smoke).parse_args().smoke)


def clean_up_on_sigterm() -> None:
    """Leave all `with` blocks at SIGTERM too, which remove network namespaces and processes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
