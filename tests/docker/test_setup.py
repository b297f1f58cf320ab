"""What the set-up says on a machine that lacks something."""

import os
import subprocess
from pathlib import Path

import pytest


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
        timeout=60,
    )
    return done.returncode, done.stderr.strip()


def fake_java(path: Path, version: str, modules: str) -> None:
    java = path / "java"
    java.write_text(
        '#!/usr/bin/env bash\nif [ "$1" = -version ]; then\n'
        f"  echo 'openjdk version \"{version}\" 2025-04-15' >&2\nelse\n  echo {modules}@17\nfi\n"
    )
    java.chmod(0o755)


def test_no_java_is_one_sentence_with_the_package(project: Path, bare_path: Path) -> None:
    code, error = run(project / "docker/horovod/check_host.sh", bare_path)
    assert code == 1
    assert error == (
        "groundswell: Java is missing, and Spark needs Java 17 or 21. "
        "On Debian or Ubuntu: sudo apt-get install openjdk-17-jre-headless"
    )


@pytest.mark.parametrize(
    ("version", "modules", "reason"),
    [
        ("11.0.2", "jdk.incubator.vector", "Java 11 is too old"),
        ("1.8.0_292", "", "Java 1 is too old"),
        ("17.0.1", "java.base", "lacks the module jdk.incubator.vector"),
    ],
)
def test_an_unfit_java_is_named(project: Path, bare_path: Path, version: str, modules: str, reason: str) -> None:
    fake_java(bare_path, version, modules)
    code, error = run(project / "docker/horovod/check_host.sh", bare_path)
    assert code == 1
    assert reason in error
    assert "openjdk-17-jre-headless" in error
    assert "\n" not in error


def test_this_machines_java_is_accepted(project: Path) -> None:
    assert subprocess.run([project / "docker/horovod/check_host.sh"], env=dict(os.environ), timeout=60).returncode == 0


def test_no_compiler_is_one_sentence_with_the_package(project: Path, bare_path: Path, tmp_path: Path) -> None:
    code, error = run(project / "docker/horovod/install.sh", bare_path, str(tmp_path / "environment"), "cpu")
    assert code == 1
    assert error.endswith("is missing. On Debian or Ubuntu: sudo apt-get install g++")
    assert not (tmp_path / "environment").exists()
