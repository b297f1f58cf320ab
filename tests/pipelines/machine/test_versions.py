"""Executors that would run other code than the driver."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines.machine.versions import check_code, digest_of, imported_version, own_version, versions
from pipelines.spark import tasks
from pipelines.storage.folder import Location
from tests.patience import patient

ROOT = Path(__file__).parents[3]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    for name in ("a.py", "inner/b.py", "data.yaml"):
        (package / name).write_text("a: 1\n")
    return package


def test_the_code_counts_and_not_whether_a_package_is_installed() -> None:
    """As for executors that get it in a zip file, by `--py-files`."""
    check_code("0.2.0.dev0 (code 5f0c21a9d3e7)", "none (code 5f0c21a9d3e7)", "host")
    with pytest.raises(RuntimeError, match=r"the executor on host would run 0\.2\.0\.dev0 \(code 123456789abc\)"):
        check_code("0.2.0.dev0 (code 5f0c21a9d3e7)", "0.2.0.dev0 (code 123456789abc)", "host")


def test_every_python_file_counts_and_no_other(package: Path) -> None:
    before = digest_of([package])
    assert len(before) == 12
    (package / "data.yaml").write_text("a: 2\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"")
    assert digest_of([package]) == before
    (package / "inner" / "b.py").rename(package / "inner" / "c.py")
    renamed = digest_of([package])
    (package / "inner" / "c.py").write_text("a: 2\n")
    assert len({before, renamed, digest_of([package])}) == 3


def test_a_zip_file_has_the_digest_of_its_folder(package: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for file in sorted(package.rglob("*.*"), reverse=True):
            archive.write(file, file.relative_to(tmp_path))
    assert digest_of([zipfile.Path(packed, "package/")]) == digest_of([package])


def test_versions_name_what_ranks_need() -> None:
    found = versions()
    assert found["groundswell"] == own_version()
    assert {"python", "tensorflow", "tensorflow-cpu", "keras", "horovod"} < set(found)


CHANGES_WHILE_IT_RUNS = """
import pathlib, sys
from pipelines.launch.runner import BarrierRunner

def answer():
    return 42

print(BarrierRunner(None, 1).run(answer))
with pathlib.Path("models/schedules.py").open("a") as file:
    file.write("# changed\\n")
try:
    BarrierRunner(None, 1).run(answer)
except RuntimeError as error:
    sys.exit(str(error))
"""


def test_code_that_changes_under_a_running_driver_is_refused(tmp_path: Path) -> None:
    for package in ("conf", "models", "pipelines"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "driver.py").write_text(CHANGES_WHILE_IT_RUNS)
    found = subprocess.run(
        [sys.executable, "driver.py"], cwd=tmp_path, capture_output=True, text=True, timeout=patient(120), check=False
    )
    assert (found.stdout, found.returncode) == ("42\n", 1), found.stderr
    expected = "the driver runs groundswell .*and the executor on 127.0.0.1 would run.*start the driver again .*Python"
    assert re.match(expected, found.stderr.splitlines()[-1])


def test_tasks_of_another_code_write_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = (tmp_path / "written").write_text

    def run() -> list[int]:
        names = {"job": "prepare", "folder": Location.at(tmp_path), "files": ["written"], "less_memory": "x"}
        return tasks.run_tasks(spark, ["a"], write, **names)

    monkeypatch.setattr(tasks, "OWN_VERSION", "0.0.1 (code 000000000000)")
    with pytest.raises(
        RuntimeError, match=r"the driver runs groundswell 0\.0\.1 \(code 000000000000\), and the executor"
    ):
        run()
    assert not (tmp_path / "written").exists()
    monkeypatch.undo()
    assert (run(), (tmp_path / "written").read_text(), own_version()) == ([1], "a", imported_version())
