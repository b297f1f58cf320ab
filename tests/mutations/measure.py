"""Measures which lines and branches of the product each test runs:

    python tests/mutations/measure.py FOLDER [--project PATH] [-- arguments of pytest]

Without arguments of pytest, the whole suite runs but for the slow lanes of a release. FOLDER gets:

- `covered.json`: lines and branches that were run, and those that were missed, of each file;
- `contexts`: coverage's data, whose contexts are the tests;
- `durations.json`: seconds that each test takes alone, of the tests that passed;
- `fixtures.json`: the tests that use what a fixture of a module or of the session made.

Every process of the project's environment is measured that comes from these tests (`traced_processes.py`).
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage

from tests.mutations.moved import PACKAGES, PROJECT

INSTALLED, START_FILE = ("traced_processes.py", "traced_tests.py"), "traced_processes.pth"
CONFIG_VARIABLE = "TRACED_CONFIG"
_CONFIG = """\
[run]
branch = true
parallel = true
data_file = {folder}/processes/coverage
disable_warnings = already-imported, module-not-imported, module-not-measured, no-data-collected, trace-changed
source =
{sources}
"""


def write_config(folder: Path, sources: Sequence[Path]) -> Path:
    """Make the folder of a measurement with coverage's configuration; return that file."""
    (folder / "processes").mkdir(parents=True)
    config = folder / "coverage.ini"
    config.write_text(_CONFIG.format(folder=folder, sources="\n".join(f"    {source}" for source in sources)))
    return config


@contextlib.contextmanager
def traced_environment(project: Path) -> Iterator[None]:
    """All Python processes of the project's environment import `traced_processes.py` at their start.

    Raises:
        RuntimeError: The environment has no coverage, or a measurement runs in it.
    """
    python = project / ".venv/bin/python"
    command = [python, "-c", "import sysconfig, coverage; print(sysconfig.get_paths()['purelib'])"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise RuntimeError(f"{python} cannot import coverage: install coverage>=7.10 in that environment")
    packages = Path(asked.stdout.strip())
    if (packages / START_FILE).exists():
        raise RuntimeError(f"{packages / START_FILE} exists: remove it if no other measurement runs")
    try:
        for name in INSTALLED:
            shutil.copy(Path(__file__).with_name(name), packages)
        (packages / START_FILE).write_text("import traced_processes\n")
        yield
    finally:
        for name in (START_FILE, *INSTALLED):
            (packages / name).unlink(missing_ok=True)


def pytest_environment(project: Path) -> dict[str, str]:
    """Variables of `make test`."""
    python = str(project / ".venv/bin/python")
    return {
        **os.environ,
        # A mutated file may have the size and the second of the one that was compiled.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": python,
    }


def whole_suite(project: Path) -> list[str]:
    """Arguments of pytest; it refuses markers that a checkout does not have, and early ones have no slow lanes."""
    return ["-m", "not release"] if '"release:' in (project / "pyproject.toml").read_text() else []


def collect(folder: Path, project: Path) -> None:
    """Combine what all processes wrote, and write the four results."""
    files = sorted((folder / "processes").glob("coverage.*"))
    readable = [file for file in files if _is_readable(file)]
    measured = coverage.Coverage(data_file=str(folder / "contexts"), config_file=str(folder / "coverage.ini"))
    measured.combine([str(file) for file in readable], strict=True)
    measured.save()
    report = folder / "report.json"
    measured.json_report(outfile=str(report), ignore_errors=True)
    found = {
        str(Path(name).absolute().relative_to(project)): {
            "lines": values["executed_lines"],
            "branches": values["executed_branches"],
            "missing_lines": values["missing_lines"],
            "missing_branches": values["missing_branches"],
        }
        for name, values in json.loads(report.read_text())["files"].items()
    }
    report.unlink()
    _write(folder / "covered.json", found)
    _collect_tests(folder)
    lost = len(files) - len(readable)
    print(f"{len(files)} processes, {lost} of them killed while they wrote; {len(found)} files of the product")


def _is_readable(file: Path) -> bool:
    try:
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as data:
            tables = {name for (name,) in data.execute("select name from sqlite_master")}
            return "arc" in tables and data.execute("pragma quick_check").fetchone() == ("ok",)
    except sqlite3.Error:
        return False


def _collect_tests(folder: Path) -> None:
    seconds: dict[str, float] = {}
    tests: dict[str, set[str]] = defaultdict(set)
    for file in sorted((folder / "processes").glob("*.json")):
        written = json.loads(file.read_text())
        seconds |= written["seconds"]
        for context, users in written["tests"].items():
            tests[context] |= set(users)
    _write(folder / "durations.json", seconds)
    _write(folder / "fixtures.json", {context: sorted(users) for context, users in tests.items()})


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> int:
    """Measure, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder that does not exist yet")
    parser.add_argument("--project", type=Path, default=PROJECT, help="another checkout, with its own .venv")
    own, tests = sys.argv[1:], list[str]()
    if "--" in own:
        own, tests = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    folder, project = arguments.folder.absolute(), arguments.project.resolve()
    if folder.exists():
        parser.error(f"{folder} exists")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    command = [project / ".venv/bin/pytest", "-p", "traced_tests", *(tests or whole_suite(project))]
    try:
        with traced_environment(project):
            config = write_config(folder, [project / package for package in PACKAGES])
            environment = {**pytest_environment(project), CONFIG_VARIABLE: str(config)}
            code = subprocess.run(command, cwd=project, env=environment, check=False).returncode
    except RuntimeError as error:
        parser.exit(2, f"{error}\n")
    collect(folder, project)
    return code


if __name__ == "__main__":
    sys.exit(main())
