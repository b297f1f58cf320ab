"""Which tests guard a place of the product, by what `measure.py` wrote, and in which order they run."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import coverage

from tests.mutations.moved import PACKAGES
from tests.mutations.mutated import Place

_FIRST_BATCH_SECONDS, _LARGEST_BATCH_SECONDS = 10.0, 640.0


class Guards:
    """Tests by the lines that they run."""

    def __init__(self, folder: Path) -> None:
        """Read a measurement."""
        self.seconds: dict[str, float] = json.loads((folder / "durations.json").read_text())
        self._fixtures: dict[str, list[str]] = json.loads((folder / "fixtures.json").read_text())
        self._data = coverage.CoverageData(str(folder / "contexts"))
        self._data.read()

    def tests_of(self, place: Place, project: Path) -> list[str]:
        """The tests that run any line of a place, those that take the least time first.

        What runs when a module is imported runs once in a process. It belongs to all tests that run any line of the
        file. Where the file has no functions, it belongs to those that run any line of a file that imports it.
        """
        found = self._tests_of_lines(place.path, project, place.lines)
        if place.runs_at_import:
            for file in [place.path] if place.has_functions else importers(place.path, project):
                found |= self._tests_of_lines(file, project, None)
        return sorted(found, key=lambda test: (self.seconds[test], test))

    def _tests_of_lines(self, path: Path, project: Path, lines: frozenset[int] | None) -> set[str]:
        name = f"/{path.relative_to(project)}"
        tests = set()
        for file in self._data.measured_files():
            if file.endswith(name):
                for line, contexts in self._data.contexts_by_lineno(file).items():
                    if lines is None or line in lines:
                        for context in contexts:
                            tests |= {context, *self._fixtures.get(context, ())}
        return {test for test in tests if test in self.seconds}


def importers(path: Path, project: Path) -> list[Path]:
    """The files of the product that name a module of it."""
    module = ".".join(path.relative_to(project).with_suffix("").parts).removesuffix(".__init__")
    files = [file for package in PACKAGES for file in sorted((project / package).rglob("*.py"))]
    return [file for file in files if module in file.read_text()]


def batches(tests: Sequence[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Cut tests into parts that run in one process each: importing TensorFlow takes long. Later ones are longer."""
    limit, batch, total = _FIRST_BATCH_SECONDS, [], 0.0
    for test in tests:
        if batch and total + seconds[test] > limit:
            yield batch
            limit, batch, total = min(limit * 2, _LARGEST_BATCH_SECONDS), [], 0.0
        batch.append(test)
        total += seconds[test]
    if batch:
        yield batch
