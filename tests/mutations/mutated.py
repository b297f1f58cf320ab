"""Places of drawn mutations in the files of today, and files that are mutated for a while."""

import ast
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutations.moved import file_of_today, line_numbers, lines_of_commit

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Place(NamedTuple):
    """A mutation in a file of today."""

    path: Path
    line: int
    lines: frozenset[int]
    """The statement, or its head where it holds others."""
    runs_at_import: bool
    has_functions: bool
    """Whether the file has any."""
    text: str
    """The file with the mutation."""


def locate(mutation: dict[str, Any], commit: str, project: Path) -> Place | None:
    """Find where a mutation is now; None where its text is gone.

    Args:
        mutation: An entry of `drawn.json`, or with line 0 one in the words of today.
        commit: What it was drawn from.
        project: The checkout.
    """
    path = file_of_today(mutation["file"], project)
    if path is None:
        return None
    text = path.read_text()
    lines = text.splitlines()
    before = lines_of_commit(commit, mutation["file"]) if mutation["line"] else lines
    line, old = line_numbers(before, lines).get(mutation["line"]), mutation["old"]
    if line is not None:
        column = mutation["column"] + _indent(lines[line - 1]) - _indent(before[mutation["line"] - 1])
    elif text.count(old) == 1 == "\n".join(before).count(old):  # the rest of its line has changed
        line = text[: text.index(old)].count("\n") + 1
        column = lines[line - 1].index(old.partition("\n")[0])
    else:
        return None
    mutated = replaced(text, line, column, mutation["old"], mutation["new"])
    if mutated is None:
        return None
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    at_import = not any(node.body[0].lineno <= line <= (node.end_lineno or 0) for node in functions)
    own = range(line, line + mutation["old"].count("\n") + 1)
    return Place(path, line, frozenset({*own, *_statement(tree, line, column)}), at_import, functions != [], mutated)


def replaced(text: str, line: int, column: int, old: str, new: str) -> str | None:
    """A text with `new` in the place of `old`, which begins at a line (from 1) and a column; None if it does not."""
    offset = sum(map(len, text.splitlines(keepends=True)[: line - 1])) + column
    return text[:offset] + new + text[offset + len(old) :] if text.startswith(old, offset) else None


@contextlib.contextmanager
def applied(path: Path, text: str, backup: Path) -> Iterator[None]:
    """Give a file another text for a while; meanwhile `backup` holds its own, for `restore`."""
    original = path.read_text()
    backup.write_text(json.dumps({"file": str(path), "text": original}))
    try:
        path.write_text(text)
        yield
    finally:
        path.write_text(original)
        backup.unlink()


def restore(backup: Path) -> None:
    """Restore the file of a run that was killed, if there is one."""
    if backup.exists():
        left = json.loads(backup.read_text())
        Path(left["file"]).write_text(left["text"])
        backup.unlink()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _statement(tree: ast.Module, line: int, column: int) -> range:
    """Lines of the innermost statement at a place."""
    found: ast.stmt | None = None
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.stmt) and _begin(node) <= (line, column) and (node.end_lineno or 0) >= line:
            found = node
    if found is None:
        return range(0)
    body = getattr(found, "body", None)
    if not body:
        return range(found.lineno, (found.end_lineno or found.lineno) + 1)
    return range(_begin(found)[0], max(body[0].lineno, found.lineno + 1))


def _begin(node: ast.stmt) -> tuple[int, int]:
    first: ast.stmt | ast.expr = (getattr(node, "decorator_list", None) or [node])[0]
    return first.lineno, first.col_offset
