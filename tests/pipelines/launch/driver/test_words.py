"""The launcher is a library by itself: who calls a BarrierRunner has no configuration whose keys it could name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from conf.schema import RunConfig

KEY = re.compile(rf"(?<![\w.])({'|'.join(RunConfig.model_fields)})\.[a-z_]+")


def test_messages_of_the_launcher_name_no_key_of_the_configuration(project: Path) -> None:
    found = [
        f"{file.relative_to(project)}: {text}"
        for file in sorted((project / "pipelines/launch").rglob("*.py"))
        for text in texts(ast.parse(file.read_text()))
        if KEY.search(text)
    ]
    assert found == []


def test_a_key_is_found() -> None:
    module = 'def f(n):\n    """Not training.epochs."""\n    raise ValueError(f"{n} is little: raise launch.retries")\n'
    (text,) = (text for text in texts(ast.parse(module)) if KEY.search(text))
    assert text == " is little: raise launch.retries"


def texts(tree: ast.Module) -> Iterator[str]:
    """Texts of a module that are no docstrings."""
    described = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            yield node.value
