"""The command `groundswell VERB ...`, with one verb per job."""

import difflib
import errno
import importlib
import os
import platform
import signal
import sys
import threading
from collections.abc import Sequence

from jobs.shell.arguments import EXIT_CODES
from jobs.shell.command import INFRASTRUCTURE, USER_ERROR, Result, read_config, run
from jobs.shell.verbs import VERBS, parser_of
from pipelines.machine.console import print_lossily, printable
from pipelines.machine.packages import require
from pipelines.machine.versions import NOT_INSTALLED, version_of

_PRINTING = ("config", "list", "schedule")
"""Verbs whose work is what they print."""
_VERSIONS = ("pyspark", "horovod", "tensorflow-cpu", "tensorflow", "keras", "mlflow")


def execute(argv: Sequence[str]) -> int:
    """Run one command line, and return its exit code."""
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        print("\n".join(_help()))
        return 0
    if name == "--version":
        print("\n".join(_versions()))
        return 0
    if name not in VERBS:
        print(printable(_unknown(name, rest)), file=sys.stderr)
        return USER_ERROR
    parser = parser_of(name)

    def body(result: Result) -> None:
        arguments = parser.parse(rest)
        if getattr(arguments, "config", None) is not None:
            read_config(arguments)  # reports a mistake before the import of Spark
        require(name, VERBS[name].needs)
        importlib.import_module(f"jobs.{name.replace('-', '_')}").main(arguments, result)

    return run(name, rest, body)


def main(verb: str | None = None) -> None:
    """Run the command line of this process, and end the process if the job has failed.

    After success the function returns: Databricks calls a wheel's entry point in a process that continues afterwards.

    Args:
        verb: Verb of a script that spark-submit runs; None: the first argument.
    """
    output, _ = print_lossily("stdout"), print_lossily("stderr")
    line = sys.argv[1:] if verb is None else [verb, *sys.argv[1:]]
    code = execute(line)
    if output is not None and output.lost is not None and output.lost.errno != errno.EPIPE:
        print(printable(f"groundswell: standard output is not complete: {output.lost.strerror}"), file=sys.stderr)
        if code == 0 and line[0] in _PRINTING:
            code = INFRASTRUCTURE
    if threading.current_thread() is threading.main_thread():
        # The job is finished: Ctrl-C while libraries shut down prints no traceback.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))
    if code:
        sys.exit(code)


def _help() -> list[str]:
    width = max(map(len, VERBS)) + 2
    return [
        "usage: groundswell VERB [--help | ARGUMENTS]",
        "       groundswell --version",
        "",
        *(f"  {name:<{width}}{verb.summary}" for name, verb in VERBS.items()),
        "",
        EXIT_CODES,
    ]


def _unknown(name: str, rest: Sequence[str]) -> str:
    if not name:
        return "\n".join(_help())
    if name.startswith("-"):
        verb = next((text for text in rest if text in VERBS), "VERB")
        return f"groundswell: error: the verb comes first: groundswell {verb} {name} ..."
    close = difflib.get_close_matches(name, VERBS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(VERBS)}"
    return f"groundswell: error: {name!r} is not a verb: {hint}"


def _versions() -> list[str]:
    # Only one of the two TensorFlow packages is installed.
    found = [f"{package} {version}" for package in _VERSIONS if (version := version_of(package)) != NOT_INSTALLED]
    return [
        f"groundswell {version_of('groundswell')}",
        f"python {platform.python_version()}, {', '.join(found)}",
    ]


if __name__ == "__main__":
    main()
