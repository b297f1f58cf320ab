"""What the set-up says on a machine that lacks something."""

import importlib.util
import os
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.patience import patient


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH with the shell's own tools and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("bash", "sed", "head", "grep", "cut", "sort", "dirname", "realpath", "printf", "env", "mkdir", "rm"):
        (folder / tool).symlink_to(f"/usr/bin/{tool}")
    return folder


def run(script: Path, path: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        ["/usr/bin/bash", str(script), *arguments],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    return done.returncode, done.stderr.strip()


def tool(path: Path, name: str, text: str) -> None:
    (path / name).write_text(f"#!/usr/bin/bash\n{text}\n")
    (path / name).chmod(0o755)


def test_no_java_is_one_sentence_with_the_package(project: Path, bare_path: Path) -> None:
    assert run(project / "docker/horovod/check_host.sh", bare_path) == (
        1,
        "groundswell: Java is missing, and Spark needs Java 17 or 21. "
        "On Debian or Ubuntu: sudo apt-get install openjdk-17-jre-headless",
    )


@pytest.mark.parametrize(
    ("version", "modules", "home", "reason"),
    [
        ("11.0.2", "jdk.incubator.vector", "", "Java 11 is too old.*openjdk-17-jre-headless"),
        ("1.8.0_292", "", "", "Java 1 is too old.*openjdk-17-jre-headless"),
        ("25.0.1", "jdk.incubator.vector", "", "Java 25 is too new.*openjdk-17-jre-headless"),
        ("17.0.1", "java.base", "", r"lacks the module jdk\.incubator\.vector.*openjdk-17-jre-headless"),
        (
            "17.0.1",
            "jdk.incubator.vector",
            "/nowhere",
            "JAVA_HOME=/nowhere has no bin/java: unset it, or name a Java 17 or",
        ),
    ],
)
def test_an_unfit_java_is_named(
    project: Path, bare_path: Path, version: str, modules: str, home: str, reason: str
) -> None:
    shown = f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"
    tool(bare_path, "java", f'if [ "$1" = -version ]; then {shown}; else echo {modules}@17; fi')
    code, error = run(project / "docker/horovod/check_host.sh", bare_path, **({"JAVA_HOME": home} if home else {}))
    assert code == 1
    assert re.fullmatch(f"groundswell: .*{reason}.*", error), "one line"


def test_this_machines_java_is_accepted(project: Path) -> None:
    command = [project / "docker/horovod/check_host.sh"]
    assert subprocess.run(command, env=dict(os.environ), timeout=patient(60)).returncode == 0


def test_no_compiler_is_one_sentence_with_the_package(project: Path, bare_path: Path, tmp_path: Path) -> None:
    code, error = run(project / "docker/horovod/install.sh", bare_path, str(tmp_path / "environment"), "cpu")
    assert code == 1
    assert error.endswith("is missing. On Debian or Ubuntu: sudo apt-get install g++")
    assert not (tmp_path / "environment").exists()


@pytest.fixture
def logged_uv(bare_path: Path, tmp_path: Path) -> Path:
    """A uv that writes its arguments, a line each call, into the file that is returned; and what it is asked for."""
    log = tmp_path / "uv.log"
    tool(bare_path, "uv", f'[ "$1" != --version ] || {{ echo "uv 99.0.0"; exit; }}\necho "$*" >>{log}')
    for name in ("g++", "make", "python3", "ccache"):
        tool(bare_path, name, "exit 0")
    return log


def test_the_set_up_changes_its_own_environment_alone(
    project: Path, bare_path: Path, logged_uv: Path, tmp_path: Path
) -> None:
    """Whatever Python uv would take by the user's settings, and with a compiler behind a launcher."""
    environment = tmp_path / "environment"
    settings = {"UV_SYSTEM_PYTHON": "1", "UV_PYTHON": "/usr/bin/python3", "CXX": "ccache g++"}
    assert run(project / "docker/horovod/install.sh", bare_path, str(environment), "cpu", **settings) == (0, "")
    made, synced = logged_uv.read_text().splitlines()
    assert made == f"venv --quiet --python 3.11 {environment}"
    assert synced.startswith(f"pip sync --python {environment}/bin/python --quiet --require-hashes ")


@pytest.mark.parametrize("broken", ["no python", "another place", "a user's folder", ""])
def test_an_environment_that_does_not_run_is_made_again(
    project: Path, bare_path: Path, logged_uv: Path, tmp_path: Path, broken: str
) -> None:
    """A folder that is no environment is not cleared."""
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    if broken != "a user's folder":
        (environment / "pyvenv.cfg").touch()
    place = "/elsewhere" if broken == "another place" else environment
    (environment / "bin" / "activate").write_text(f"VIRTUAL_ENV='{place}'\n")
    if broken in {"another place", ""}:
        tool(environment / "bin", "python", "exit 0")
    assert run(project / "docker/horovod/install.sh", bare_path, str(environment), "cpu") == (0, "")
    made = [line for line in logged_uv.read_text().splitlines() if line.startswith("venv")]
    clear = "" if broken == "a user's folder" else "--clear "
    assert made == ([f"venv --quiet {clear}--python 3.11 {environment}"] if broken else [])


@pytest.mark.parametrize("script", ["install.sh", "build_wheel.sh"])
def test_a_path_with_spaces_is_named_before_anything_is_fetched(
    project: Path, bare_path: Path, logged_uv: Path, tmp_path: Path, script: str
) -> None:
    folder = tmp_path / "a b" / "docker" / "horovod"
    folder.mkdir(parents=True)
    for name in (script, "uv.sh"):
        (folder / name).write_text((project / "docker" / "horovod" / name).read_text())
    code, error = run(folder / script, bare_path, "3.12", "2.19.0")
    assert (code, error, logged_uv.exists()) == (
        2,
        f"groundswell: Horovod does not build in a path with spaces: {folder}",
        False,
    )


@pytest.mark.parametrize("fault", ["", "no python", "no link"])
def test_make_sets_up_again_where_the_environment_is_not_this_folders(
    project: Path, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "Makefile").write_text((project / "Makefile").read_text())
    packages = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "_groundswell.pth").write_text("/elsewhere" if fault == "no link" else str(tmp_path))
    (tmp_path / ".venv" / "bin").mkdir()
    if fault != "no python":
        tool(tmp_path / ".venv" / "bin", "python", "exit 0")
    for name in (
        *("requirements.lock", "pyproject.toml", "hatch_build.py"),
        "docker/horovod/install.sh",
        "docker/horovod/uv.sh",
        "docker/horovod/include/x.h",
        "models/compiled.py",
        ".venv/.ready",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command = ["make", "--dry-run", "--directory", str(tmp_path), "setup"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(60), env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 0, done.stderr
    assert ("install.sh" in done.stdout) == bool(fault)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("3.12",), "usage: build_wheel.sh PYTHON TENSORFLOW [FOLDER] [cpu|gpu]"),
        (("3.12", "2.15.0"), "TensorFlow '2.15.0': expected a full version from 2.16.1 to 2.21, such as 2.19.0"),
        (("3.12", "2.19"), "TensorFlow '2.19': expected a full version from 2.16.1 to 2.21, such as 2.19.0"),
        (("3.12", "2.19.0", "folder", "tpu"), "variant 'tpu' is neither cpu nor gpu"),
    ],
)
def test_a_wheel_of_horovod_is_for_a_known_tensorflow(
    project: Path, bare_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    code, error = run(project / "docker/horovod/build_wheel.sh", bare_path, *arguments)
    assert code != 0
    assert error.endswith(reason)


def test_every_runtime_has_a_wheel_of_horovod_and_fits_the_wheels_ranges(project: Path) -> None:
    columns = tomllib.loads((project / "tests" / "runtimes" / "columns.toml").read_text())
    metadata = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    extras = metadata["optional-dependencies"]
    ranges = {
        Requirement(line).name: Requirement(line).specifier
        for line in [*metadata["dependencies"], *extras["local"], *extras["cpu"]]
    }
    supported = re.search(r"\^2\\\.\(([\d|]+)\)", (project / "docker" / "horovod" / "build_wheel.sh").read_text())
    assert supported is not None
    for column in columns.values():
        required = [Requirement(line) for line in column["packages"]]
        pinned = {each.name: next(iter(each.specifier)).version for each in required}
        for name, version in pinned.items():
            assert name not in ranges or ranges[name].contains(version), f"{name}=={version}"
        assert SpecifierSet(metadata["requires-python"]).contains(column["python"])
        assert pinned["tensorflow-cpu"].split(".")[1] in supported[1].split("|")


@pytest.fixture(scope="module")
def runtimes(project: Path) -> ModuleType:
    """The script of `make test-runtimes`."""
    spec = importlib.util.spec_from_file_location("runtimes", project / "tests" / "runtimes" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_step_in_a_runtime_names_tests_that_exist(project: Path, runtimes: ModuleType) -> None:
    for name in (each for step in runtimes.STEPS.values() for each in step if each.startswith("tests/")):
        path, _, test = name.partition("::")
        assert (project / path).exists(), path
        assert not test or f"\ndef {test}(" in (project / path).read_text(), name


@pytest.mark.parametrize(
    ("code", "lines", "cell"),
    [
        (0, ["...", "== 10 passed in 95.1s (0:01:35) ==", "a thread's last words"], "10 passed in 95.1s (0:01:35)"),
        (1, ["1 failed, 9 passed in 95.1s"], "code 1: 1 failed, 9 passed in 95.1s"),
        (4, ["ERROR: not found", "no tests ran in 0.0s"], "code 4: no tests ran in 0.0s"),
        (-9, ["..."], "code -9: no last line"),
    ],
)  # fmt: skip
def test_a_step_in_a_runtime_has_failed_where_pytest_says_so(
    runtimes: ModuleType, code: int, lines: list[str], cell: str
) -> None:
    assert runtimes.cell_of(code, lines) == cell
    assert bool(runtimes.FAILED.match(cell)) is (code != 0)
