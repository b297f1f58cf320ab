"""Sessions other than the shared one live in processes of their own: there is one SparkContext in a process."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

_RUN = """
import pickle, sys
function, args = pickle.load(open(sys.argv[1], "rb"))
pickle.dump(function(*args), open(sys.argv[2], "wb"))
"""


@pytest.fixture(scope="session")
def in_fresh_process(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Callable[..., Any]:
    """Calls a function in a new Python and returns its value."""

    def call(function: Callable[..., Any], *args: Any, timeout: float = 280) -> Any:
        folder = tmp_path_factory.mktemp("process")
        cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        try:
            (folder / "call").write_bytes(cloudpickle.dumps((function, args)))
        finally:
            cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])
        paths = [str(project), os.environ.get("PYTHONPATH", "")]
        (folder / "tmp").mkdir()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYSPARK_PYTHON": sys.executable,
            "TMPDIR": str(folder / "tmp"),
        }
        command = [sys.executable, "-c", _RUN, str(folder / "call"), str(folder / "value")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=folder)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        return pickle.loads((folder / "value").read_bytes())

    return call
