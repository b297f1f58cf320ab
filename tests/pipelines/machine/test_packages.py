import importlib.util
import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from conf.load import load
from pipelines.machine import packages
from pipelines.machine.packages import SPARK, TRAINING, MissingPackageError, require
from pipelines.machine.versions import NOT_INSTALLED
from pipelines.training.driver.checks import check_dataset


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch):
    """Makes packages look as if they were not installed."""
    real = importlib.util.find_spec

    def lack(*names: str) -> None:
        monkeypatch.setattr(packages, "find_spec", lambda name: None if name in names else real(name))

    return lack


def test_what_is_installed_is_not_imported() -> None:
    before = set(sys.modules)
    require("training", TRAINING)
    assert not (set(sys.modules) - before) & {"tensorflow", "keras", "horovod", "horovod.tensorflow"}


REQUIRES = [
    "numpy<3,>=1.23.5",
    "pyspark<4.2,>=3.5; extra == 'local'",
    'tensorflow-cpu<2.22,>=2.16.1; extra == "cpu"',
    "keras<4,>=3.2.1; extra == 'cpu'",
    "keras<4,>=3.2.1; extra == 'gpu'",
]


# It names no extra of groundswell: that name could be somebody else's on an index.
ALL_ARE_MISSING = (
    "train needs pyspark, tensorflow, keras, horovod, which are not installed: pip install 'pyspark<4.2,>=3.5' "
    "'tensorflow-cpu<2.22,>=2.16.1' 'keras<4,>=3.2.1' (with GPUs: tensorflow[and-cuda] in place of "
    "tensorflow-cpu); and Horovod 0.28.1 built for this TensorFlow (docker/horovod/build_wheel.sh makes its wheel)"
)


@pytest.mark.parametrize(
    ("missing", "metadata", "message"),
    [
        (("pyspark", "tensorflow", "keras", "horovod"), REQUIRES, rf"^{re.escape(ALL_ARE_MISSING)}\Z"),
        # A cluster's own TensorFlow stays where Keras alone is missing.
        (("keras",), REQUIRES, r"pip install 'keras<4,>=3\.2\.1'$"),
        # As from a .zip of --py-files.
        (("tensorflow",), None, r"pip install '<the wheel of groundswell>\[cpu\]' \(with GPUs"),
    ],
    ids=["all", "Keras alone", "no metadata"],
)
def test_the_line_names_the_packages_and_what_installs_them_or_without_metadata_the_wheels_extras(
    missing: tuple[str, ...], metadata: list[str] | None, message: str, lacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(*missing)
    monkeypatch.setattr(packages, "requires", lambda name: metadata)
    if metadata is None:
        monkeypatch.setattr(packages, "version_of", lambda name: NOT_INSTALLED)
    with pytest.raises(MissingPackageError, match=message):
        require("train", TRAINING)


def test_one_missing_package(lacks) -> None:
    lacks("petastorm")
    with pytest.raises(MissingPackageError, match=r"^reader\.name=petastorm needs petastorm, which is not installed: "):
        require("reader.name=petastorm", ["petastorm"])


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "petastrom").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match="petastrom, which is not installed"):
        require("this test", ["petastrom"])


def test_a_horovod_without_tensorflow_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horovod" / "tensorflow").mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    with pytest.raises(MissingPackageError, match="train needs Horovod with its TensorFlow part, which this one lacks"):
        require("train", TRAINING)


@pytest.mark.parametrize(
    ("variable", "file", "message"),
    [
        ("jax", "{}", "needs TensorFlow, and KERAS_BACKEND is jax: set KERAS_BACKEND=tensorflow"),
        ("", '{"backend": "torch"}', r".*the backend in .*/keras\.json is torch: set KERAS_BACKEND=tensorflow"),
        ("tensorflow", '{"backend": "torch"}', ""),
        ("", "{}", ""),
        ("", "no JSON", ""),
    ],
)
def test_training_needs_kerass_backend_tensorflow(
    variable: str, file: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", variable)
    (tmp_path / "keras.json").write_text(file)
    require("prepare", SPARK)
    with pytest.raises(ValueError, match=rf"^train {message}$") if message else nullcontext():
        require("train", TRAINING)


def test_a_dataset_is_not_read_under_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(ValueError, match=r"^training needs TensorFlow, and KERAS_BACKEND is jax"):
        check_dataset(load("smoke"))
