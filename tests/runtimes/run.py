"""Tries the wheel in an environment with exactly a runtime's versions, Horovod built for its TensorFlow.

    make test-runtimes RUNTIME=17.3

Without RUNTIME it tries all columns of columns.toml, one after the other. Environments, wheels and logs stay in
build/runtimes (FOLDER=... elsewhere), a few GiB for each column. A column takes about ten minutes the first time and
keeps what it has built; `make clean` does not touch it. The last lines are a table of all columns tried so far, with a
cell for each step: pytest's last line, and its exit code where that is not 0.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
STEPS = {
    "the whole way": [
        "tests/jobs/test_smoke.py::test_the_run_holds_what_a_reader_looks_for",
        "tests/jobs/test_smoke.py::test_checkpoints_are_kept_and_what_is_sent_is_counted",
        "tests/jobs/test_smoke.py::test_evaluation_scores_the_test_split",
        "tests/jobs/test_smoke.py::test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped",
        "tests/jobs/test_smoke.py::test_resuming_otherwise_is_refused",
    ],
    "score": ["tests/pipelines/scoring/test_score.py", "-m", "not long"],
    "compare": ["tests/pipelines/comparison", "tests/jobs/test_compare.py", "-m", "not long"],
    "launcher": ["tests/pipelines/launch", "-m", "not long"],
    "networks, codecs, optimizers": ["tests/models", "-m", "not long"],
    "tracking": ["tests/pipelines/tracking", "-m", "not long"],
}
"""What pytest is given for each column of the table, the first: prepare, two workers train, evaluate, resume."""
TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "psutil", "moto[s3,server]>=5,<6", "s3fs>=2023.5", "deltalake>=1.1,<2"]
"""What the tests need besides: pytest, an object store on loopback, and a reader of Delta tables."""
FAILED = re.compile(r"code -?\d+: ")
"""How the cell of a step begins that has failed."""


def call(command: list[str | Path], log: Path, **options: Any) -> int:
    """Run a command, its output at the end of the log."""
    with log.open("a") as output:
        print("$", *command, file=output, flush=True)
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, **options).returncode


def find_uv() -> str:
    """The uv that `make setup` brought, or the one on the PATH."""
    uv = shutil.which("uv") or shutil.which("uv", path=PROJECT / ".venv-uv" / "bin")
    if uv is None:
        raise SystemExit("uv is neither on the PATH nor in .venv-uv: run make setup")
    return uv


def find_python(version: str) -> str:
    """The first interpreter of that version on the PATH that runs, or the version, which uv may bring."""
    for folder in os.get_exec_path():
        python = Path(folder, f"python{version}")
        # A shim of pyenv exists for versions that it does not run.
        if python.exists() and not subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode:
            return str(python)
    return version


def version_of(packages: list[str], name: str) -> str:
    """The version that a column pins."""
    return next(line.partition("==")[2] for line in packages if line.startswith(f"{name}=="))


def cell_of(code: int, lines: list[str]) -> str:
    """The table's cell for a run of pytest: its last line, with the exit code in front where that is not 0."""
    last = next((line.strip("= ") for line in reversed(lines) if re.search(r" in [\d.]+s", line)), "no last line")
    return f"code {code}: {last}" if code else last


class Column:
    """One runtime: its environment, and what runs in it."""

    def __init__(self, key: str, column: dict[str, Any], folder: Path) -> None:
        self.key, self.packages, self.python = key, column["packages"], find_python(column["python"])
        self.folder = folder / key
        self.environment = self.folder / "environment"
        self.horovod = folder / "horovod" / f"{column['python']}-{version_of(self.packages, 'tensorflow-cpu')}"
        self.log = self.folder / "log"
        self.folder.mkdir(parents=True, exist_ok=True)

    def make(self, uv: str, wheel: Path) -> str:
        """Make the environment; the reason where that fails."""
        python = self.environment / "bin" / "python"
        if not python.exists() and call([uv, "venv", "--python", self.python, self.environment], self.log):
            return f"no Python {self.python}: put the folder of one on the PATH"
        install: list[str | Path] = [uv, "pip", "install", "--python", python]
        if call([*install, f"{wheel}[local,cpu]", *self.packages, *TOOLS], self.log):
            return "the wheel and these versions do not fit together"
        call([*install, "--no-deps", "--reinstall-package", "groundswell", wheel], self.log)
        if not list(self.horovod.glob("*.whl")):
            script = PROJECT / "docker" / "horovod" / "build_wheel.sh"
            if call(["bash", script, self.python, version_of(self.packages, "tensorflow-cpu"), self.horovod], self.log):
                return "Horovod does not build"
        (built,) = self.horovod.glob("*.whl")
        return "Horovod does not install" if call([*install, built], self.log) else ""

    def run(self, steps: list[str]) -> dict[str, str]:
        """Run the tests of each step from a folder without our packages, so that the wheel's are tested."""
        checkout = self.folder / "checkout"
        shutil.rmtree(checkout, ignore_errors=True)
        checkout.mkdir()
        for name in ("tests", "pyproject.toml"):
            copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
            copy(PROJECT / name, checkout / name)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "PYTHON"))}
        # Workers import some tests, by the name of their folder.
        environment |= {
            "PATH": f"{self.environment / 'bin'}{os.pathsep}{environment['PATH']}",
            "PYTHONPATH": str(checkout),
        }
        found = {}
        for step in steps:
            start = self.log.stat().st_size if self.log.exists() else 0
            # Older versions warn of other things.
            command = [self.environment / "bin" / "pytest", "-q", "-W", "default", *STEPS[step]]
            code = call(command, self.log, cwd=checkout, env=environment)
            with self.log.open(errors="replace") as log:
                log.seek(start)
                lines = log.read().splitlines()
            found[step] = cell_of(code, lines)
            print(f"{self.key}: {step}: {found[step]}", flush=True)
        return found


def main() -> int:
    """Try the columns that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("columns", nargs="*", metavar="RUNTIME")
    parser.add_argument("--folder", type=Path, default=PROJECT / "build" / "runtimes")
    parser.add_argument("--step", action="append", choices=STEPS, help="only this (default: all)")
    arguments, columns = parser.parse_args(), tomllib.loads((Path(__file__).parent / "columns.toml").read_text())
    unknown = set(arguments.columns) - set(columns)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected one of {', '.join(columns)}")
    folder = arguments.folder.absolute()
    uv, steps = find_uv(), arguments.step or list(STEPS)
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.json"
    with tempfile.TemporaryDirectory() as dist:
        if call([uv, "build", "--wheel", "--out-dir", dist, PROJECT], folder / "build.log"):
            raise SystemExit(f"the wheel does not build, see {folder / 'build.log'}")
        (wheel,) = Path(dist).glob("*.whl")
        for key in arguments.columns or list(columns):
            started, column = time.monotonic(), Column(key, columns[key], folder)
            print(f"{key}: making the environment, see {column.log}", flush=True)
            problem = column.make(uv, wheel)
            found = {"environment": problem} if problem else column.run(steps)
            kept = json.loads(results.read_text()) if results.exists() else {}
            earlier = {name: text for name, text in kept.get(key, {}).items() if name != "environment"}
            kept[key] = {**earlier, **found}
            results.write_text(json.dumps(kept, indent=2))
            print(f"{key}: {time.monotonic() - started:.0f} s", flush=True)
    print("\n".join(["| runtime | " + " | ".join(STEPS) + " |", "|---|" + "---|" * len(STEPS)]))
    for key, row in kept.items():
        cells = [row.get("environment") or row.get(step, "not tried") for step in STEPS]
        print(f"| {key} | {' | '.join(cells)} |")
    cells = [cell for row in kept.values() for cell in row.values()]
    return int(any("environment" in row for row in kept.values()) or any(map(FAILED.match, cells)))


if __name__ == "__main__":
    sys.exit(main())
