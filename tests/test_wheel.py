"""The wheel in fresh environments of every Python that it is for."""

import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.format.petastorm import UNISCHEMA_KEY, pickled_schema
from tests.patience import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NEVER_IN_THE_CORE = {"tensorflow", "tensorflow-cpu", "keras", "pyspark", "horovod", "petastorm"}


def call(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(800), **options)


@pytest.fixture(scope="module")
def uv(project: Path) -> str:
    found = shutil.which("uv") or shutil.which("uv", path=project / ".venv-uv" / "bin")
    if found is None:
        pytest.skip("uv is neither on the PATH nor in .venv-uv")
    return found


@pytest.fixture(scope="module")
def wheel(uv: str, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = call(uv, "build", "--quiet", "--wheel", "--out-dir", folder, project)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def interpreter(uv: str, version: str) -> str:
    """An installed Python of that version, wherever it is."""
    known = list((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python{version}"))
    if known:
        return str(known[-1])
    found = call(uv, "python", "find", "--no-python-downloads", version)
    if found.returncode != 0:
        pytest.skip(f"there is no Python {version}")
    return found.stdout.strip()


def test_one_wheel_is_for_every_python(wheel: Path, project: Path) -> None:
    # The kernels in it use TensorFlow's C interface, and nothing of Python.
    assert "-py3-none-" in wheel.name
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info" not in name}
    assert {name.split("/")[0] for name in names} == {"conf", "groundswell.py", "jobs", "models", "pipelines"}
    assert {
        str(path.relative_to(project)) for end in ("html", "css") for path in project.glob(f"pipelines/**/*.{end}")
    } <= names
    assert any(name.endswith(".so") for name in names) == (shutil.which(os.environ.get("CXX", "g++")) is not None)


OF_EXTRAS = {
    "local": {"pyspark"},
    "cpu": {"tensorflow-cpu", "keras", "tensorboard"},
    "gpu": {"tensorflow", "keras", "tensorboard", "nvidia-ml-py"},
    "petastorm": {"petastorm"},
    "s3": {"s3fs"},
    "score": {"openvino", "nncf", "deltalake"},
}
"""What each extra brings at least."""


@pytest.mark.release
@pytest.mark.parametrize("version", ["3.11", "3.12"])
@pytest.mark.parametrize("extra", OF_EXTRAS)
def test_every_extra_finds_versions_that_fit_together(uv: str, project: Path, extra: str, version: str) -> None:
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", version]
    done = call(*command, "--extra", extra, "--extra", "local", project / "pyproject.toml")
    assert done.returncode == 0, done.stderr
    versions = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    assert OF_EXTRAS[extra] <= set(versions)
    if int(versions["pyarrow"].split(".")[0]) < 15:  # Petastorm's
        assert versions["pyspark"].startswith("4.0.")  # 4.1 refuses pyarrow 14


@pytest.mark.parametrize("version", ["3.11", "3.12"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of pyarrow, for each of Petastorm's calls
def test_it_installs_and_says_what_else_it_needs(uv: str, wheel: Path, version: str, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    assert call(uv, "venv", "--quiet", "--python", interpreter(uv, version), environment).returncode == 0
    settings = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "PYTHON", "SPARK"))
    }
    install = [uv, "pip", "install", "--quiet", "--python", environment / "bin" / "python"]
    done = call(*install, wheel)
    assert done.returncode == 0, done.stderr
    listed = call(uv, "pip", "list", "--format", "freeze", "--python", environment / "bin" / "python").stdout
    assert not NEVER_IN_THE_CORE & {line.partition("==")[0] for line in listed.splitlines()}
    command = environment / "bin" / "groundswell"
    run = {"cwd": tmp_path, "env": settings}
    shown = call(command, "--help", **run)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "write a raw archive as a dataset" in shown.stdout
    missing = call(command, "train", "--config", "smoke", "--set", "dataset.path=x", **run)
    assert (missing.returncode, missing.stdout) == (2, "")
    (line,) = missing.stderr.splitlines()
    assert line.startswith("groundswell train: error: train needs pyspark, tensorflow, keras, horovod, which are not ")
    command_line, _, hint = line.partition("pip install ")[2].partition("; and Horovod 0.28.1 ")[0].partition(" (")
    assert hint == "with GPUs: tensorflow[and-cuda] in place of tensorflow-cpu)"
    assert {each.strip("'").partition("<")[0] for each in command_line.split()} == {
        "pyspark",
        "tensorflow-cpu",
        "keras",
        "tensorboard",
    }

    done = call(*install, f"{wheel}[local]")
    assert done.returncode == 0, done.stderr
    dataset = tmp_path / "dataset"
    archive = "archive={kind: synthetic, train: 16, validation: 8, test: 8}"
    prepared = call(
        command, "prepare", "--config", "smoke", "--set", archive, "--set", f"dataset.path={dataset}", **run
    )
    assert prepared.returncode == 0, prepared.stderr
    missing = call(command, "train", "--config", "smoke", "--set", f"dataset.path={dataset}", **run)
    assert missing.returncode == 2
    assert "train needs tensorflow, keras, horovod, which are not installed" in missing.stderr

    # Petastorm, which is not in that environment, reads what was written there.
    from petastorm import make_reader

    manifest = read_manifest(dataset)
    metadata = pq.read_schema(dataset / "train" / "_common_metadata").metadata
    assert metadata[UNISCHEMA_KEY] == pickled_schema(manifest.groups, len(manifest.class_names))
    with make_reader((dataset / "train").as_uri(), num_epochs=1, reader_pool_type="dummy") as reader:
        assert len({row.id for row in reader}) == 16
