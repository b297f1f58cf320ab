"""Text from elsewhere changes no terminal and runs in no spreadsheet."""

import ast
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.machine.console import PrintableFormatter, cell, escape, printable
from tests.house import sources
from tests.patience import patient

HOSTILE = {
    "\x1b[31mred\x1b[0m": "red",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "a\rb\x08\n\tc": "a\\rb\\x08\n\tc",
    "\u202etxt.exe\u2066": r"\u202etxt.exe\u2066",
    "\x9b2J": r"\x9b2J",
    "\udcff": r"\udcff",
    "Wälder, 木": "Wälder, 木",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_only_what_can_be_seen_is_shown(text: str) -> None:
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "%s", (text,), None)
    shown = (printable(text), PrintableFormatter("%(message)s").format(record), escape(f"<{text}>"))
    assert shown == (HOSTILE[text], HOSTILE[text], f"&lt;{HOSTILE[text]}&gt;")


@pytest.mark.parametrize(
    "text", ["=1", " =1+1", "\t=1", "\n=1", "\r=1", "\uff1d1+1", "@SUM(1)", "+1+cmd", "-2+3", "--1", "\uff0dx"]
)
def test_a_cell_is_no_formula(text: str) -> None:
    assert cell(text) == f"'{printable(text)}"


@pytest.mark.parametrize("value", ["-2", "+1.5e-3", "-.5", "x=1", "", 3, -1.0, None])
def test_numbers_and_other_text_stay(value: object) -> None:
    assert cell(value) == value


def test_nothing_of_others_is_printed_as_it_is(project: Path) -> None:
    """Prints of our own words are listed; HTML is escaped and CSV is written by the functions above."""
    raw, escapes = [], []
    for file in sources(project):
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                raw += [file.name] * ("printable(" not in ast.unparse(node))
            escapes += [file.name] * (isinstance(node, ast.ImportFrom) and node.module == "html")
    assert (raw, escapes) == (
        ["jobs/notebooks/prepare_and_look.py", "jobs/notebooks/score_a_table.py"]
        + ["jobs/shell/cli.py"] * 2  # help and versions
        + ["jobs/shell/command.py"]
        + ["pipelines/launch/keras_door/callbacks.py"]
        + ["pipelines/training/driver/trial.py"] * 2,  # for the driver, which prints it
        [],
    )


def test_output_that_the_terminal_cannot_encode_ends_no_job() -> None:
    groundswell = Path(sys.executable).with_name("groundswell")
    command = [groundswell, "config", "--config", "demo", "--set", "dataset.path=/data/木"]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1:strict"}, timeout=patient(60)
    )
    assert (done.returncode, rb"/data/\u6728" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("list --result result.json | true; exit ${PIPESTATUS[0]}", 0, ""),
        ("estimate --help > /dev/full", 0, ""),
        ("config --config demo > /dev/full", 4, "groundswell: standard output is not complete: No space left"),
        ("list >&-", 0, ""),
        ("list 2>&- >&- <&-", 0, ""),
        ("lits 2> /dev/full", 2, ""),
    ],
)
def test_output_that_nobody_takes_ends_no_job(line: str, code: int, said: str, tmp_path: Path) -> None:
    """A reader that leaves, a full disk, and no output at all."""
    done = subprocess.run(
        ["bash", "-c", f"{Path(sys.executable).with_name('groundswell')} {line}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=patient(60),
    )
    assert (done.returncode, done.stderr.startswith(said), done.stderr == "") == (code, True, said == ""), done.stderr
    assert [json.loads(path.read_text())["ended"] for path in tmp_path.iterdir()] == ["finished"] * ("result" in line)
