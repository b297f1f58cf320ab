"""The tools of tests/mutations: what was drawn, how it is applied, which processes are measured, what is compared."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutations import measure
from tests.mutations.compare import lost_of_file
from tests.mutations.draw import AREAS, IN_EACH_AREA, Mutation
from tests.mutations.guards import Guards, batches
from tests.mutations.moved import DRAWN, line_numbers
from tests.mutations.mutated import Place, applied, replaced, restore
from tests.mutations.pytest_run import Ended, run_pytest
from tests.mutations.run import Trial
from tests.mutations.tiny import PRODUCT, TESTS
from tests.patience import patient

SETTINGS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Importing the plugins of this environment takes longer than these tests."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkout that has been measured into its folder `measured`; its start file is `sitecustomize.py`."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "product.py").write_text(PRODUCT)
    (folder / "test_product.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (folder / ".venv").symlink_to(sys.prefix)
    site = folder / "site"
    site.mkdir()
    for name in measure.INSTALLED:
        shutil.copy(Path(measure.__file__).with_name(name), site)
    (site / "sitecustomize.py").write_text("import traced_processes\n")
    config = measure.write_config(folder / "measured", [folder])
    environment = {**measure.pytest_environment(folder), **SETTINGS, measure.CONFIG_VARIABLE: str(config)}
    environment["PYTHONPATH"] = f"{site}:{folder}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "traced_tests"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(120))
    assert "1 failed, 5 passed" in done.stdout, done.stdout + done.stderr
    measure.collect(folder / "measured", folder)
    return folder


def line_of(text: str) -> int:
    """The number of the only line of the product with a text."""
    (number,) = [number for number, line in enumerate(PRODUCT.splitlines(), 1) if text in line]
    return number


@pytest.mark.parametrize(
    "end",
    [
        *(f'return "{kind}"' for kind in ("subprocess", "fork", "fixture", "later")),
        *("    os._exit(0)\n\ndef in_kill", "os.kill(", "os.execv("),  # processes are measured however they end
    ],
)
def test_processes_are_measured(project: Path, end: str) -> None:
    covered = json.loads((project / "measured" / "covered.json").read_text())["product.py"]
    assert PRODUCT[: PRODUCT.index(end)].count("\n") + 1 in covered["lines"]


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        ("return one + other", ["add"]),
        ('return "subprocess"', ["ends"]),
        ('return "fork"', ["fork"]),
        ('return "fixture"', ["first", "later"]),  # one of them has the fixture made
        ('return "later"', ["later"]),  # in a process that began before this test
        ("LIMIT = 3", ["add", "ends", "first", "fork", "later"]),  # runs when the module is imported
    ],
)
def test_a_line_has_its_tests(project: Path, text: str, tests: list[str]) -> None:
    assert sorted(Guards(project / "measured").tests_of(place_of(project, text), project)) == [
        f"test_product.py::test_{name}" for name in tests
    ]


def place_of(project: Path, text: str, new: str = "") -> Place:
    line, path = line_of(text), project / "product.py"
    return Place(path, line, frozenset({line}), text == "LIMIT = 3", True, PRODUCT.replace(text, new))


def test_a_mutation_is_found_by_the_test_of_its_line(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    place, guards = place_of(project, "one + other", "one - other"), Guards(project / "measured")
    trial = Trial(place, guards, project, tmp_path / "backup", tmp_path / "log")
    assert (trial.first_failure(guards.tests_of(place, project)), (project / "product.py").read_text()) == (
        "test_product.py::test_add",
        PRODUCT,
    )
    unknown = "test_product.py::test_gone"
    assert run_pytest(project, [unknown], patient(60), tmp_path / "log") == Ended(4, [], [unknown], False)


FAILS, PASSES = Ended(1, ["x.py::b"], [], False), Ended(0, [], [], False)


@pytest.mark.parametrize(
    ("runs", "found", "unstable"),
    [
        ([FAILS, FAILS, PASSES], "x.py::b", []),
        ([FAILS, PASSES, PASSES], None, ["x.py::b"]),
        ([FAILS, FAILS, FAILS, PASSES], None, ["x.py::b"]),
        ([Ended(-1, [], [], True)], "time-out of 3 tests, the first is x.py::a", []),
        ([Ended(4, [], ["x.py::c"], False), PASSES, FAILS, FAILS, PASSES], "x.py::b", []),
        ([Ended(4, [], [], False), FAILS, PASSES], "x.py::a", []),  # conftest.py cannot be imported
        ([PASSES], None, []),
    ],
)
def test_a_failure_counts_when_it_comes_with_the_mutation_only(
    runs: list[Ended], found: str | None, unstable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, path = ["x.py::a", "x.py::b", "x.py::c"], tmp_path / "x.py"
    path.write_text("")
    guards, left = SimpleNamespace(seconds=dict.fromkeys(tests, 1.0)), iter(runs)
    monkeypatch.setattr("tests.mutations.run.run_pytest", lambda *_: next(left))
    trial = Trial(Place(path, 1, frozenset(), False, True, ""), guards, tmp_path, tmp_path / "backup", tmp_path / "log")
    assert (trial.first_failure(tests), trial.unstable, list(left)) == (found, unstable, [])


def test_tests_of_a_measurement_take_what_their_shared_fixtures_take(project: Path) -> None:
    seconds = json.loads((project / "measured" / "durations.json").read_text())
    assert {name.rpartition("_")[2] for name in seconds} == {"add", "ends", "fork", "first", "later"}
    assert seconds["test_product.py::test_later"] >= 1.0


def test_four_mutations_are_drawn_in_each_area() -> None:
    drawn: list[dict[str, Any]] = json.loads(DRAWN.read_text())
    assert [each["area"] for each in drawn] == [area for area in AREAS for _ in range(IN_EACH_AREA)]
    for each in drawn:
        assert tuple(each) == Mutation._fields
        assert Mutation(**each).old != Mutation(**each).new


def test_every_mutation_is_applied_and_taken_back(tmp_path: Path) -> None:
    for number, each in enumerate(json.loads(DRAWN.read_text())):
        path, backup = tmp_path / f"{number}.py", tmp_path / "backup"
        begin, end = "\n" * (each["line"] - 1) + "x" * each["column"], " # é\n"
        path.write_text(begin + each["old"] + end)
        text = replaced(path.read_text(), each["line"], each["column"], each["old"], each["new"])
        assert text == begin + each["new"] + end
        with suppress(KeyboardInterrupt), applied(path, text, backup):
            assert path.read_text() == text
            raise KeyboardInterrupt
        assert (path.read_text(), backup.exists()) == (begin + each["old"] + end, False)


def test_the_file_of_a_run_that_was_killed_is_restored(tmp_path: Path) -> None:
    path, backup = tmp_path / "file.py", tmp_path / "backup"
    path.write_text("own")
    with applied(path, "mutated", backup):
        shutil.copy(backup, tmp_path / "left")
    path.write_text("mutated")
    restore(tmp_path / "left")
    assert path.read_text() == "own"
    restore(tmp_path / "left")  # nothing is left


def test_lines_are_found_where_they_have_moved() -> None:
    before = ["a", "b", "    c", "d", "", "e"]
    assert line_numbers(before, ["new", "a", "e", "c", "d", ""]) == {1: 2, 3: 4, 4: 5, 5: 6, 6: 3}


def test_what_is_covered_no_longer_is_listed_if_it_still_exists() -> None:
    before = {"lines": [1, 2, 3, 4], "branches": [[2, 3], [2, 4], [3, -1]]}
    numbers = {1: 11, 2: 12, 4: 14}  # the third line is gone
    after = {"missing_lines": [14, 15], "missing_branches": [[12, 14], [12, 15]]}
    assert (lost_of_file(before, after, numbers), lost_of_file(before, None, numbers)) == (
        [(12, 14), (14, None)],
        [(11, None), (12, None), (12, 14), (14, None)],
    )


def test_fast_tests_share_a_process() -> None:
    seconds = {"a": 1.0, "b": 2.0, "c": 8.0, "d": 9.0, "e": 50.0}
    assert list(batches("abcde", seconds)) == [["a", "b"], ["c", "d"], ["e"]]
