"""What the product's files look like: python tests/house.py [PROJECT], as in `make check`.

It prints each place where one of these is true:

* a folder or a file is too large;
* a folder has no map;
* imports go in a circle;
* two classes have one name;
* a phrase or the beginning of a docstring is not plain English;
* something outside of `modes/` asks which training mode it has;
* a function of `pipelines` takes the whole configuration and is not listed here.
"""

import ast
import graphlib
import io
import itertools
import operator
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from conf.sections.modes import MODES

PROJECT = Path(__file__).parents[1]
PACKAGES = ("conf", "jobs", "models", "pipelines")
FOLDER_FILES = 15
FILES_WITHOUT_MAP = 5
MORE_FILES = {
    "jobs": 18,
    # One file for each row of a table.
    "conf/sections": 30,
    "models/compression/codecs": 30,
    "models/networks": 30,
    "models/optimizers": 30,
    "pipelines/archives/bigearthnet": 30,
    "pipelines/archives/images": 30,
    "pipelines/training/modes": 30,
}
"""Folders that may have more files than the others."""
FILE_LINES = 450
TAKE_ALL = {
    "pipelines/training/checkpoint/settings.py: recorded_settings",
    "pipelines/training/driver/checks.py: _check_steps",
    "pipelines/training/driver/checks.py: batch_text",
    "pipelines/training/driver/checks.py: check_dataset",
    "pipelines/training/driver/checks.py: check_resume",
    "pipelines/training/driver/export.py: log_trained",
    "pipelines/training/driver/identity.py: training_digest",
    "pipelines/training/driver/resumable.py: with_stored_run",
    "pipelines/training/driver/run.py: _write_beginning",
    "pipelines/training/driver/run.py: recorded_run",
    "pipelines/training/driver/trial.py: build_parts",
    "pipelines/training/driver/trial.py: has_own_parts",
    "pipelines/training/driver/trial.py: try_parts",
    "pipelines/training/entry.py: look",
    "pipelines/training/entry.py: run_range_test",
    "pipelines/training/entry.py: search_batch",
    "pipelines/training/entry.py: train",
    "pipelines/training/validation.py: make_validation",
    "pipelines/training/finders/workers.py: batch_search_worker",
    "pipelines/training/finders/workers.py: range_test_worker",
    "pipelines/training/rank_training.py: _make_checkpoints",
    "pipelines/training/rank_training.py: make_rank_training",
    "pipelines/training/record/summary.py: summary_of",
    "pipelines/training/setup/description.py: describe_run",
    "pipelines/training/setup/description.py: parameters_of",
    "pipelines/training/setup/description.py: settings_of",
    "pipelines/training/setup/description.py: tags_of",
    "pipelines/training/setup/input.py: make_input",
    "pipelines/training/setup/rank_setup.py: _begin",
    "pipelines/training/setup/rank_setup.py: make_rank_setup",
    "pipelines/training/setup/rates.py: make_schedule",
    "pipelines/training/setup/recipe.py: make_exchange",
    "pipelines/training/setup/recipe.py: make_mode",
    "pipelines/training/setup/recipe.py: make_model",
    "pipelines/training/setup/resolution.py: trained_sizes",
    "pipelines/training/setup/rank_setup.py: make_mode_of",
    "pipelines/training/worker.py: _finish",
    "pipelines/training/worker.py: train_worker",
}
"""Functions that take the whole configuration."""
README_LINES = {"README.md": 160, "CHANGELOG.md": 60}
PHRASES = re.compile(
    r"\b(of which|begun|told|so many|meanwhile|goes on|go on|anew|by which|that it tells of)\b".replace(" ", r"\s+"),
    re.IGNORECASE,
)
# "seed: Of the shuffle." leaves out the noun, "client: As above." what is alike, "log: Gets all output." who does.
FRAGMENT = re.compile(r"(As|At|By|For|Gets|Has|In|Is|Of|Shown|That|Told)\b")
_ENTRY = re.compile(r"^ +\*{0,2}\w+(, \*{0,2}\w+)*: (?P<text>.*)$")
_SECTION = re.compile(r"^ *(?P<name>Args|Attributes|Raises|Returns|Yields):$")
_OF_MODES = re.compile(r"/modes/|^conf/sections/mode(s|_declaration)\.py$")
_FOR_ALL_MODES = {"ModeConfig", "MODES", "SynchronousConfig", "ALONE", "ModeDeclaration", "Idle"}
_ASKS_FOR_TYPE = re.compile(r"^(isinstance|issubclass|type|getattr)\(.*\b(mode|declaration)\b")
_NAMES_MODE = re.compile(r"\bmode(\.declaration)?(\.name)?\b")
_IS_MODE = re.compile(r"\b(mode|declaration)$")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """A file of the product."""

    name: str
    text: str
    tree: ast.Module


def sources(project: Path) -> list[Source]:
    """Parse all Python files of the product."""
    found = [project / "groundswell.py"]
    for package in PACKAGES:
        found += sorted((project / package).rglob("*.py"))
    texts = {path.relative_to(project).as_posix(): path.read_text() for path in found}
    return [Source(name, text, ast.parse(text)) for name, text in texts.items()]


def _folders(files: list[Source]) -> list[tuple[str, int]]:
    names = [Path(file.name) for file in files]
    return sorted(Counter(name.parent.as_posix() for name in names if name.name != "__init__.py").items())


def maps(files: list[Source], project: Path) -> Iterator[str]:
    """Find larger folders without a README."""
    for folder, count in _folders(files):
        if count > FILES_WITHOUT_MAP and not (project / folder / "README.md").is_file():
            yield f"{folder}: {count} files and no README.md that says who calls whom"


def sizes(files: list[Source]) -> Iterator[str]:
    """Find folders with too many files, and files with too many lines."""
    for folder, count in _folders(files):
        if count > (limit := MORE_FILES.get(folder, FOLDER_FILES)):
            yield f"{folder}: {count} files, at most {limit}: give a part of it a folder"
    for file in files:
        if (count := file.text.count("\n")) > FILE_LINES:
            yield f"{file.name}: {count} lines, at most {FILE_LINES}: cut it where it holds two things"


def circles(files: list[Source]) -> Iterator[str]:
    """Find one circle of imports; imports inside functions count."""
    modules = {file.name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}
    graph = {name: _imported(file.tree) & modules.keys() - {name} for name, file in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield f"imports in a circle: {' <- '.join(error.args[1])}"


def _imported(tree: ast.Module) -> set[str]:
    nodes = [*ast.walk(tree)]
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return found | {name for node in modules for a in node.names for name in (node.module, f"{node.module}.{a.name}")}


def phrases(files: list[Source], project: Path) -> Iterator[str]:
    """Find listed phrases in docstrings, comments, strings and the documents of the repository."""
    for file in files:
        for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                yield from _phrases_of(file.name, token.string, token.start[0])
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=project, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        text = (project / name).read_text()
        yield from _phrases_of(name, text, 1)
        if (count := text.count("\n")) > README_LINES.get(name, count):
            yield f"{name}: {count} lines, at most {README_LINES[name]}"


def _phrases_of(file: str, text: str, first: int) -> Iterator[str]:
    for found in PHRASES.finditer(text):
        yield f"{file}:{first + text.count(chr(10), 0, found.start())}: {found[0]!r}: say it in standard English"


def fragments(files: list[Source]) -> Iterator[str]:
    """Find docstrings that begin with half a sentence, such as "Of the shuffle."."""
    for file in files:
        for number, text in _beginnings(file.tree):
            if FRAGMENT.match(text):
                yield f"{file.name}:{number}: {text!r}: begin with the noun"


def _beginnings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The first line of every docstring, argument and return value, with its line number."""
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
        if header := _SECTION.match(line):
            section, begins = header["name"], True
        elif section in ("Args", "Attributes") and (entry := _ENTRY.match(line)):
            yield number, entry["text"]
        elif section in ("Returns", "Yields") and begins:
            yield number, line.strip()
            begins = False


def mode_checks(files: list[Source]) -> Iterator[str]:
    """Find what asks for the type, the name or an own attribute of a training mode, outside of the modes."""
    fields = {key for mode in MODES.values() for key in mode.model_fields} - {"name"}
    for file in files:
        if not _OF_MODES.search(file.name):
            for node in ast.walk(file.tree):
                if text := _asked(node, fields):
                    yield f"{file.name}: {text!r} asks which training mode it has: let its declaration say it"


def _asked(node: ast.AST, fields: set[str]) -> str:
    match node:
        case ast.ImportFrom(module="conf.sections.modes" | "conf.sections.mode_declaration", names=names):
            return ", ".join(alias.name for alias in names if alias.name not in _FOR_ALL_MODES)
        case ast.ImportFrom(module=str(module)) if module.startswith("pipelines.training.modes"):
            return "" if module == "pipelines.training.modes.table" else module
        case ast.Call() if _ASKS_FOR_TYPE.match(text := ast.unparse(node)):
            return text
        case ast.Compare() if _NAMES_MODE.search(text := ast.unparse(node)):
            named = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
            return text if named & {*MODES} else ""
        case ast.Attribute(value=value, attr=name) if name in fields and _IS_MODE.search(ast.unparse(value)):
            return ast.unparse(node)
    return ""


def whole_configurations(files: list[Source]) -> Iterator[str]:
    """Find functions of `pipelines` that take the whole configuration and are not listed."""
    found = set()
    for file in files:
        for node in ast.walk(file.tree) if file.name.startswith("pipelines/") else ():
            if isinstance(node, _Function):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                annotations = [ast.unparse(each.annotation) for each in arguments if each.annotation]
                if any(re.search(r"\bRunConfig\b", annotation) for annotation in annotations):
                    found.add(f"{file.name}: {node.name}")
    for name in sorted(found - TAKE_ALL):
        yield f"{name} takes the whole configuration: let it take the sections or values that it uses"
    for name in sorted(TAKE_ALL - found):
        yield f"{name} is listed in tests/house.py, and does not take the whole configuration"


def class_names(files: list[Source]) -> Iterator[str]:
    """Find classes of different files with one name."""
    classes = {
        (node.name, file.name) for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)
    }
    for name, places in itertools.groupby(sorted(classes), key=operator.itemgetter(0)):
        found = [file for _, file in places]
        if len(found) > 1:
            yield f"class {name} is defined in {' and in '.join(found)}: give each a name of its own"


def problems(project: Path) -> list[str]:
    """Everything that is found in a checkout."""
    files = sources(project)
    checks = (sizes, circles, fragments, mode_checks, whole_configurations, class_names)
    return [*maps(files, project), *phrases(files, project), *(problem for check in checks for problem in check(files))]


def main() -> int:
    """Print what is found; return the exit status."""
    found = problems(Path(*sys.argv[1:]) if sys.argv[1:] else PROJECT)
    print("\n".join(found) or "the house is in order")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
