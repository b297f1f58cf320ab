"""Draws the mutations that the tests must find: python tests/mutations/draw.py > tests/mutations/drawn.json.

A mutation is a small change of one place of the product. Four places are drawn in each of ten areas, from all places
where an operator applies, with a fixed seed: nobody chooses them. `drawn.json` keeps what was drawn at one commit, as
text that is replaced in a file. So later commits can be compared with it (`run.py`).
"""

import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[2]
SEED, IN_EACH_AREA = 20261128, 4
AREAS: dict[str, list[str]] = {
    "exchange": ["models/compression/exchange/*.py"],
    "codecs": ["models/compression/codecs/*.py", "models/compression/schemes/*.py"],
    "LARS and LAMB": ["models/optimizers/lars.py", "models/optimizers/lamb.py", "models/optimizers/layerwise.py"],
    "reader's order": ["pipelines/dataset/order.py"],
    "checkpoint": ["pipelines/training/checkpoint.py", "pipelines/training/checkpoint_files.py"],
    "resume": ["pipelines/training/resume.py", "pipelines/training/rank_state.py"],
    "staging": ["pipelines/dataset/staging.py"],
    "supervisor": ["pipelines/launch/supervisor.py", "pipelines/launch/failure.py", "pipelines/launch/members.py"],
    "journal": ["pipelines/tracking/journal.py", "pipelines/tracking/delivery.py"],
    "score's output": ["pipelines/scoring/output.py", "pipelines/scoring/write.py", "pipelines/scoring/finished.py"],
}
TURNED: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Lt: ast.GtE(),
    ast.GtE: ast.Lt(),
    ast.Gt: ast.LtE(),
    ast.LtE: ast.Gt(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}


class Mutation(NamedTuple):
    """One change of one file."""

    area: str
    operator: str
    file: str
    line: int
    """Where `old` begins, from 1."""
    column: int
    """In characters, from 0."""
    old: str
    new: str


class Place(NamedTuple):
    """One node that an operator applies to."""

    operator: str
    node: ast.expr | ast.stmt
    new: str


def places(tree: ast.Module) -> Iterator[Place]:
    """Every place where an operator applies, in the order of the file."""
    texts = {id(node) for node in _documentation(tree)} | {id(node) for node in _annotations(tree)}
    for node in ast.walk(tree):
        if id(node) in texts:
            continue
        match node:
            case ast.Compare(ops=[operator]) if type(operator) in TURNED:
                turned = ast.Compare(node.left, [TURNED[type(operator)]], node.comparators)
                yield Place("comparison turned", node, ast.unparse(turned))
            case ast.BoolOp(op=ast.And() | ast.Or()):
                other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                yield Place("and/or", node, ast.unparse(ast.BoolOp(other, node.values)))
            case ast.If() | ast.While() | ast.IfExp():
                yield Place("condition negated", node.test, f"not ({ast.unparse(node.test)})")
            case ast.Constant(value=bool() as value):
                yield Place("constant changed", node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield Place("plus or minus one", node, repr(value + 1))
                yield Place("plus or minus one", node, repr(value - 1))
            case ast.Constant(value=str() as value) if value:
                yield Place("constant changed", node, repr(value + "x"))
            case ast.Call(args=[first, second, *_]) if not any(isinstance(each, ast.Starred) for each in node.args):
                swapped = ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)
                yield Place("arguments swapped", node, ast.unparse(swapped))
            case ast.Assign() | ast.AugAssign() | ast.Expr() | ast.Raise() | ast.Return() | ast.Assert():
                yield Place("statement removed", node, "pass")


def _documentation(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements that are texts only, and those texts: they change nothing. Parts of f-strings are messages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from (node, node.value)
        if isinstance(node, ast.JoinedStr):
            yield from ast.walk(node)


def _annotations(tree: ast.Module) -> Iterator[ast.AST]:
    """Types: nothing reads them while the program runs."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if (annotation := getattr(node, name, None)) is not None:
                yield from ast.walk(annotation)


def mutations_of(area: str, file: Path) -> list[Mutation]:
    """Every mutation of one file."""
    source = file.read_text()
    lines = source.splitlines(keepends=True)
    found = []
    for operator, node, new in places(ast.parse(source)):
        old = ast.get_source_segment(source, node)
        assert old is not None
        column = len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
        name = str(file.relative_to(PROJECT))
        # In brackets: a part of an expression stays one, whatever is around it.
        text = new if isinstance(node, ast.stmt) else f"({new})"
        found.append(Mutation(area, operator, name, node.lineno, column, old, text))
    return sorted(found, key=lambda each: (each.line, each.column, each.operator, each.new))


def main() -> None:
    """Print the drawn mutations as JSON."""
    drawn = []
    for area, patterns in AREAS.items():
        files = sorted({file for pattern in patterns for file in PROJECT.glob(pattern)})
        everything = [mutation for file in files for mutation in mutations_of(area, file)]
        chosen = random.Random(f"{SEED} {area}").sample(everything, IN_EACH_AREA)
        drawn += [mutation._asdict() for mutation in chosen]
    json.dump(drawn, sys.stdout, indent=1, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
