"""Docstrings say what a value is: they do not begin with half a sentence such as "Of the shuffle."."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# "seed: Of the shuffle." leaves out the noun, "client: As above." what is alike, "log: Gets all output." who does.
FRAGMENT = re.compile(r"(As|At|By|For|Gets|Has|In|Is|Of|Shown|That|Told)\b")
ENTRY = re.compile(r"^ +\*{0,2}\w+(, \*{0,2}\w+)*: (?P<text>.*)$")
SECTION = re.compile(r"^ *(?P<name>Args|Attributes|Raises|Returns|Yields):$")


def test_docstrings_begin_with_what_is_described(project: Path) -> None:
    files = [project / "groundswell.py"]
    for package in ("conf", "jobs", "models", "pipelines"):
        files += sorted((project / package).rglob("*.py"))
    found = [
        f"{file.relative_to(project)}:{number}: {text}"
        for file in files
        for number, text in beginnings(ast.parse(file.read_text()))
        if FRAGMENT.match(text)
    ]
    assert found == []


def test_fragments_are_found() -> None:
    text = '''
"""A module."""

def shuffle(rows, seed):
    """Shuffle rows.

    Args:
        rows: Rows, of any type.
        seed: Of the shuffle.

    Returns:
        As many rows.

    Raises:
        ValueError: As for others.
    """

class Batch:
    size: int
    """Of one rank."""
'''
    found = [number for number, text in beginnings(ast.parse(text)) if FRAGMENT.match(text)]
    assert found == [9, 12, 20]


def beginnings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the first line of every docstring, argument and return value, with its line number."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(doc))):
                    lines = doc.split("\n")
                    yield statement.lineno, lines[0].strip()
                    yield from _entries(lines, statement.lineno)


def _entries(lines: list[str], first: int) -> Iterator[tuple[int, str]]:
    section, begins = "", False
    for number, line in enumerate(lines, first):
        if header := SECTION.match(line):
            section, begins = header["name"], True
        elif section in ("Args", "Attributes") and (entry := ENTRY.match(line)):
            yield number, entry["text"]
        elif section in ("Returns", "Yields") and begins:
            yield number, line.strip()
            begins = False
