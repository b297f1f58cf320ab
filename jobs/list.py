"""`groundswell list`: lists everything that a name can choose, and everything that a run records."""

import argparse
from collections.abc import Callable

from conf.describe import members, shipped
from jobs.shell.command import Result, say
from pipelines.tracking import metrics

_LISTS: dict[str, tuple[str, Callable[[], dict[str, str]]]] = {
    "archives": ("--set archive=NAME --set archive.root=FOLDER", lambda: members("archive")),
    "codecs": ("--set exchange.codec=NAME", lambda: members("exchange.codec")),
    "optimizers": ("--set optimizer=NAME", lambda: members("optimizer")),
    "modes": ("--set training.mode=NAME", lambda: members("training.mode")),
    "models": ("--set model=NAME", lambda: members("model")),
    "configurations": ("--config NAME", shipped),
    "metrics": ("in MLflow; evaluate --split NAME writes NAME/... in place of test/...", metrics.described),
}


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Print the requested lists."""
    for kind in [arguments.what] if arguments.what else _LISTS:
        usage, find = _LISTS[kind]
        found = find()
        width = max(map(len, found)) + 2
        say(f"{kind} ({usage})")
        for name, line in found.items():
            say(f"  {name:<{width}}{line}")
