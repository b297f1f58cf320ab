"""Each fault that `make check` keeps out of the product's files is found."""

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests import house

FRAGMENTS = '''
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
ASKING = """
from conf.sections.modes import DelayedConfig, MODES
import pipelines.training.modes.table
from pipelines.training.modes.local import Local
from pipelines.training.modes.table import mode_maker
isinstance(trainer.mode, Local)
config.mode.name == "delayed"
config.mode.name == other
config.mode.every_steps
config.schedule.every_steps
"""


def source(text: str, name: str = "pipelines/training/new.py") -> house.Source:
    """A file of the product."""
    return house.Source(name, dedent(text), ast.parse(dedent(text)))


@pytest.mark.parametrize(
    ("check", "files", "found"),
    [
        (house.sizes, [source("", f"jobs/{number}.py") for number in range(19)], ["jobs: 19 files, at most 18"]),
        (house.sizes, [source("\n" * 451)], ["new.py: 451 lines, at most 450"]),
        (
            house.circles,
            [
                source("def later():\n    import conf.b", "conf/a.py"),
                source("from conf.c import X", "conf/b.py"),
                source("from conf import a", "conf/c.py"),
            ],
            ["conf.a"],
        ),
        (house.circles, [source("import conf.b", "conf/a.py"), source("import conf.c", "conf/b.py")], []),
        (house.fragments, [source(FRAGMENTS)], ["new.py:9", "new.py:12", "new.py:20"]),
        (
            house.mode_checks,
            [source(ASKING)],
            ["DelayedConfig", "modes.local", "isinstance", "delayed", "every_steps"],
        ),
        (house.mode_checks, [source(ASKING, "pipelines/training/modes/new.py")], []),
        (
            house.class_names,
            [source("class Part: pass", "conf/a.py"), source("class Part: pass", "jobs/b.py")],
            ["class Part is defined in conf/a.py and in jobs/b.py"],
        ),
    ],
)
def test_a_fault_is_found(
    check: Callable[[list[house.Source]], Iterator[str]], files: list[house.Source], found: list[str]
) -> None:
    assert [problem for problem, part in zip(check(files), found, strict=True) if part not in problem] == []


def test_functions_with_the_whole_configuration_are_listed() -> None:
    new = source("def train(config: RunConfig | None): ...\ndef show(training: TrainingConfig): ...")
    found = [*house.whole_configurations([new])]
    # None of the listed ones is in this file.
    assert (found[0].split(" takes ")[0], len(found)) == ("pipelines/training/new.py: train", 1 + len(house.TAKE_ALL))


def test_listed_phrases_are_found_in_texts_and_not_in_names(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("It goes\non.\n" + "\n" * 160)
    subprocess.run("git init -q && git add README.md", shell=True, cwd=tmp_path, check=True)
    new = source('# Told by us.\nbegun = "so many"\n"""Two lines,\nanew."""')
    assert [problem.partition(": ")[0] for problem in house.phrases([new], tmp_path)] == [
        "pipelines/training/new.py:1",
        "pipelines/training/new.py:2",
        "pipelines/training/new.py:4",
        "README.md:1",
        "README.md",
    ]


def test_a_folder_of_six_files_needs_a_map(tmp_path: Path) -> None:
    files = [source("", f"jobs/{number}.py") for number in range(6)]
    assert [len([*house.maps(some, tmp_path)]) for some in (files, files[1:])] == [1, 0]
