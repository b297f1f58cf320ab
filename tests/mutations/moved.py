"""Where the lines of an earlier commit are in the files of today."""

import difflib
import functools
import subprocess
from collections import Counter
from pathlib import Path

PROJECT, DRAWN = Path(__file__).parents[2], Path(__file__).with_name("drawn.json")
PACKAGES = ("conf", "jobs", "models", "pipelines")
_LIKE = "40%"


def drawn_commit() -> str:
    """The commit that holds the drawn mutations first: no test had changed yet, and its files are what was drawn from.

    Raises:
        LookupError: The mutations are not committed.
    """
    commits = _git("log", "--diff-filter=A", "--format=%H", "--", str(DRAWN.relative_to(PROJECT))).split()
    if not commits:
        raise LookupError(f"no commit adds {DRAWN}")
    return commits[-1]


def lines_of_commit(commit: str, file: str) -> list[str]:
    """The lines of a file of a commit.

    Raises:
        LookupError: The commit has no such file.
    """
    try:
        return _git("show", f"{commit}:{file}").splitlines()
    except subprocess.CalledProcessError as error:
        raise LookupError(f"commit {commit} has no {file}: {error.stderr.strip()}") from error


def file_of_today(file: str, project: Path) -> Path | None:
    """The file of the same place; else what git says that it became; else the only file of that name."""
    if (project / file).is_file():
        return project / file
    if (moved := _moves().get(file)) is not None and (project / moved).is_file():
        return project / moved
    found = [path for package in PACKAGES for path in sorted((project / package).rglob(Path(file).name))]
    return found[0] if len(found) == 1 else None


def line_numbers(before: list[str], after: list[str]) -> dict[int, int]:
    """The number of each line in the later text, by its number in the earlier one; lines that are gone have none.

    A line that was moved over others is found where no other line of either text is like it. Comments do not count.
    """
    old, new = ([line.partition("  #")[0].strip() for line in lines] for lines in (before, after))
    found = {
        block.a + number + 1: block.b + number + 1
        for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        for number in range(block.size)
    }
    once = {line for line, count in Counter(old).items() if line and count == 1}
    once &= {line for line, count in Counter(new).items() if count == 1}
    places = {line: number for number, line in enumerate(new, 1)}
    return {number: places[line] for number, line in enumerate(old, 1) if line in once} | found


@functools.cache
def _moves() -> dict[str, str]:
    """Today's path of each file that was moved since the mutations were drawn."""
    listed = _git("diff", f"-M{_LIKE}", "--diff-filter=R", "--name-status", drawn_commit(), "--", *PACKAGES)
    return dict(line.split("\t")[1:] for line in listed.splitlines())


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
