"""Lists what the tests of an earlier commit covered and today's do not:

    python tests/mutations/compare.py BEFORE.json AFTER.json [--before COMMIT]

Both files are `covered.json` of `measure.py`: one of the earlier commit, one of this working tree. Each line and each
branch is listed where it is today. What no longer exists is not listed.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutations.moved import PROJECT, drawn_commit, file_of_today, line_numbers, lines_of_commit

Covered = dict[str, dict[str, Any]]


class Lost(NamedTuple):
    """One line, or one branch from it, with today's numbers."""

    file: str
    line: int
    to: int | None
    """Where the branch leads; negative: out of the function that begins at that line."""
    text: str

    def __str__(self) -> str:
        way = "" if self.to is None else f" -> {'the end' if self.to < 0 else self.to}"
        return f"{self.file}:{self.line}{way} {self.text}"


def lost_of_file(
    before: dict[str, Any], after: dict[str, Any] | None, numbers: dict[int, int]
) -> list[tuple[int, int | None]]:
    """Lines and branches of a file that were covered before, and are missed now.

    Args:
        before: What was covered.
        after: What is covered and missed; None: no test runs the file.
        numbers: Today's number of each line of before.

    Returns:
        A line as (line, None), and a branch as (from, to), with today's numbers.
    """
    lines = {numbers[line] for line in before["lines"] if line in numbers}
    branches = {
        (numbers[start], numbers[abs(end)] * (1 if end > 0 else -1))
        for start, end in before["branches"]
        if start in numbers and abs(end) in numbers
    }
    if after is not None:
        lines &= set(after["missing_lines"])
        branches &= {(start, end) for start, end in after["missing_branches"]}
    found = [*((line, None) for line in lines), *branches]
    return sorted(found, key=lambda each: (each[0], each[1] is not None, each[1] or 0))


def lost(before: Covered, after: Covered, commit: str, project: Path = PROJECT) -> list[Lost]:
    """Everything that is covered no longer."""
    found = []
    for file, covered in sorted(before.items()):
        path = file_of_today(file, project)
        if path is None or not covered["lines"]:
            continue
        name, lines = str(path.relative_to(project)), path.read_text().splitlines()
        numbers = line_numbers(lines_of_commit(commit, file), lines)
        for line, to in lost_of_file(covered, after.get(name), numbers):
            found.append(Lost(name, line, to, lines[line - 1].strip()))
    return found


def main() -> int:
    """Print the list, and how long it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--before", dest="commit", help="commit of BEFORE.json; default: that of the drawn mutations")
    arguments = parser.parse_args()
    before, after = (json.loads(file.read_text()) for file in (arguments.before, arguments.after))
    found = lost(before, after, arguments.commit or drawn_commit())
    branches = sum(each.to is not None for each in found)
    print(f"{len(found) - branches} lines and {branches} branches were covered before, and are not now")
    for each in found:
        print(each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
