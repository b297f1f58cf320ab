"""The door for notebooks: `import groundswell`."""

import subprocess
import sys
from pathlib import Path

import pytest

import groundswell
from tests.patience import patient

HEAVY = ("pyspark", "pyarrow", "tensorflow", "keras", "mlflow", "horovod", "petastorm", "pydantic", "numpy", "yaml")


def python(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=patient(120)
    )


def test_importing_it_imports_nothing_else(tmp_path: Path) -> None:
    done = python(f"import sys, groundswell; print(sorted(set({HEAVY!r}) & set(sys.modules)))", tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_every_name_is_what_it_says() -> None:
    from conf.load import override
    from jobs.compare import compare
    from jobs.evaluate import evaluate
    from jobs.prepare import prepare
    from jobs.probe import probe
    from jobs.score import score
    from jobs.shell.paths import load
    from jobs.train import train
    from pipelines.launch.horovod_runner import HorovodRunner
    from pipelines.launch.runner import BarrierRunner

    expected = {
        "load": load,
        "override": override,
        "prepare": prepare,
        "train": train,
        "evaluate": evaluate,
        "probe": probe,
        "score": score,
        "compare": compare,
        "BarrierRunner": BarrierRunner,
        "HorovodRunner": HorovodRunner,
    }
    assert {name: getattr(groundswell, name) for name in groundswell.__all__} == expected
    assert set(groundswell.__all__) < set(dir(groundswell))
    with pytest.raises(
        AttributeError, match=r"no attribute 'trian'; it has BarrierRunner, HorovodRunner, compare, evaluate"
    ):
        groundswell.trian  # noqa: B018


def test_a_missing_package_is_one_line(tmp_path: Path) -> None:
    script = """
import groundswell
from pipelines.machine import packages
find_spec = packages.find_spec
packages.find_spec = lambda name: None if name in ("tensorflow", "keras", "horovod") else find_spec(name)
assert groundswell.load("demo", training={"epochs": 3}).training.epochs == 3
groundswell.train
"""
    done = python(script, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "pipelines.machine.packages.MissingPackageError: groundswell.train needs tensorflow, keras, horovod,"
    )
