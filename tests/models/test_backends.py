"""Networks, losses, LARS and LAMB compute the same under Keras's JAX backend, in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.patience import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parent / "backend_step.py"


@pytest.fixture(scope="module")
def jax_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment with JAX and this Keras, and without TensorFlow."""
    folder, scripts = tmp_path_factory.mktemp("jax") / "venv", sysconfig.get_path("scripts")
    uv = shutil.which("uv", path=os.pathsep.join([scripts, f"{Path(scripts).parent}-uv/bin", os.environ["PATH"]]))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python, packages = folder / "bin" / "python", [f"keras=={keras.__version__}", "jax[cpu]"]
    if uv is None:
        pytest.skip("uv is not installed, which makes the environment")
    made = subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", str(python), *packages],
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    if made.returncode:
        pytest.skip(f"{' and '.join(packages)} cannot be installed: {made.stderr.strip().splitlines()[-1]}")
    return python


def run(python: Path, backend: str, folder: Path, project: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What the steps give, and what refuses to be computed says."""
    result = folder / f"{backend}.npz"
    environment = {
        "PATH": os.environ["PATH"],
        "KERAS_BACKEND": backend,
        "PYTHONPATH": str(project),
        "HOME": str(folder),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_ENABLE_ONEDNN_OPTS": "0",
    }
    command = [str(python), str(SCRIPT), str(folder / "weights.npz"), str(result)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=patient(600), cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    used, said = json.loads(done.stdout.splitlines()[-1])
    assert used == backend
    with np.load(result) as file:
        return dict(file), said


def test_a_step_under_jax_is_that_under_tensorflow_and_what_cannot_be_computed_says_so(
    jax_python: Path, tmp_path: Path, project: Path
) -> None:
    expected, _ = run(Path(sys.executable), "tensorflow", tmp_path, project)
    found, said = run(jax_python, "jax", tmp_path, project)
    message = "computes by operations of TensorFlow, and Keras's backend is jax: do without it, or set KERAS_BACKEND"
    assert ({name: text for name, text in said.items() if message not in text}, found.keys()) == ({}, expected.keys())
    for name, values in expected.items():
        # By the size of what moved. In the deeper network, which LAMB trains, one input of a ReLU is so close to 0 that
        # the backends decide differently: that changes the gradients of all earlier layers by half a percent.
        tolerance = 2e-3 if name.startswith("lars") else 2e-2
        difference, size = np.linalg.norm(found[name] - values), np.linalg.norm(values)
        assert difference <= tolerance * size + 1e-6, name
    for name in ("lars", "lamb"):
        assert np.isfinite(expected[f"{name}/loss"])
        moved = [np.abs(values).max() > 0 for key, values in expected.items() if key.startswith(f"{name}/moved/")]
        assert np.mean(moved) > 0.9
