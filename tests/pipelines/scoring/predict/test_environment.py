"""A logged model in an environment that has nothing but the requirements that it lists."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

from pipelines.dataset.read.reader import SplitReader
from tests.patience import patient

_LOAD = """
import importlib.util, json, sys
import numpy as np
folder, images, found = sys.argv[1:]
absent = [name for name in ("pipelines", "models", "conf", "pyspark", "horovod", "petastorm") if
          importlib.util.find_spec(name) is None]
given = dict(np.load(images))
import mlflow
served = mlflow.pyfunc.load_model(folder).predict(given)
served = next(iter(served.values())) if isinstance(served, dict) else served
import keras
plain = keras.saving.load_model(f"{folder}/data/model.keras")
np.savez(found, pyfunc=np.asarray(served), keras=plain.predict(given, verbose=0))
print(json.dumps(absent))
"""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_use_store")
def test_a_model_needs_only_its_listed_requirements(
    logged: Any, small_dataset: Path, expected: Any, project: Path, tmp_path: Path
) -> None:
    own = project / ".venv-uv" / "bin" / "uv"
    uv = str(own) if own.is_file() else shutil.which("uv")
    if uv is None:
        pytest.skip("uv, which makes the environment, is not here")
    folder = mlflow.artifacts.download_artifacts(
        artifact_uri=logged.uri, dst_path=str(tmp_path / "model"), tracking_uri=logged.store
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patient(800)
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    python = str(tmp_path / "environment" / "bin" / "python")
    run(uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "environment"))
    run(uv, "pip", "install", "--quiet", "--python", python, "-r", f"{folder}/requirements.txt")
    reader = SplitReader(small_dataset, "test")
    np.savez(tmp_path / "images.npz", **reader.gather(np.arange(len(reader))).images)
    absent = json.loads(
        run(python, "-c", _LOAD, folder, str(tmp_path / "images.npz"), str(tmp_path / "found.npz")).splitlines()[-1]
    )
    assert absent == ["pipelines", "models", "conf", "pyspark", "horovod", "petastorm"]
    wanted = np.stack([expected[name] for name in reader.ids()])
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_allclose([found["keras"], found["pyfunc"]], [wanted, wanted], atol=1e-5)
