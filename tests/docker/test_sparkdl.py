"""The wheel with the import names of Databricks' sparkdl, and an old notebook that uses it as it was written."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.patience import patient

SEPARATOR = "\n# COMMAND ----------\n"
NOTEBOOK = """
import hashlib
import numpy as np
import horovod.tensorflow.keras as hvd
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

# COMMAND ----------

def get_dataset(rank=0, size=1):
    rng = np.random.default_rng(0)
    x, y = rng.random((64, 8, 8, 1)).astype("float32"), rng.integers(0, 10, 64)
    return x[rank::size], keras.utils.to_categorical(y[rank::size], 10)

# COMMAND ----------

def get_model():
    model = keras.Sequential()
    model.add(layers.Conv2D(4, kernel_size=(3, 3), activation="relu", input_shape=(8, 8, 1)))
    model.add(layers.MaxPooling2D(pool_size=(2, 2)))
    model.add(layers.Dropout(0.25))
    model.add(layers.Flatten())
    model.add(layers.Dense(10, activation="softmax"))
    return model

# COMMAND ----------

def train_hvd(checkpoint_path, learning_rate=1.0):
    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.tensorflow.keras import LogCallback

    hvd.init()
    gpus = tf.config.experimental.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

    x, y = get_dataset(hvd.rank(), hvd.size())
    model = get_model()
    optimizer = keras.optimizers.Adadelta(learning_rate=learning_rate * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer)
    model.compile(optimizer=optimizer, loss="categorical_crossentropy", metrics=["accuracy"])
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    if hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_path + "/checkpoint-{epoch}.weights.h5", save_weights_only=True))
        callbacks.append(LogCallback())
    model.fit(x, y, batch_size=16, callbacks=callbacks, epochs=2, verbose=2)
    digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).digest()
    digests = hvd.allgather(np.frombuffer(digest, np.uint8)[None])
    log_to_driver("weights of the ranks are %s" % ("equal" if (digests[0] == digests[1]).numpy().all() else "different"))
    return model.evaluate(x, y, verbose=0)

# COMMAND ----------

from sparkdl import HorovodRunner

hr = HorovodRunner(np=2)
print("returned", len(hr.run(train_hvd, checkpoint_path=CHECKPOINTS, learning_rate=0.1)))

# COMMAND ----------

hr = HorovodRunner(np=-2)
print("returned", len(hr.run(train_hvd, checkpoint_path=CHECKPOINTS, learning_rate=0.1)))
"""  # noqa: E501  as such notebooks are


def environment(path: list[Path]) -> dict[str, str]:
    """That of this process, with folders in which Python looks first."""
    entries = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    # Where pytest is named there, a kernel leaves out of its cells what its child processes print.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**inherited, "PYTHONPATH": entries, "PYSPARK_PYTHON": sys.executable}


def run(code: str, path: list[Path], folder: Path) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment(path), capture_output=True, text=True, timeout=patient(240)
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def executed(cells: list[str], path: list[Path], folder: Path) -> list[str]:
    """What each cell prints, as a Jupyter kernel executes them one after the other; a page of it is in the folder."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text.strip("\n")) for text in cells])
    client = NotebookClient(
        notebook, timeout=int(patient(200)), coalesce_streams=True, resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment(path))
    (folder / "notebook.html").write_text(HTMLExporter().from_notebook_node(notebook)[0])
    return ["".join(each.get("text", "") for each in cell.outputs) for cell in notebook.cells]


@pytest.mark.spark
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.timeout(400)
def test_an_old_notebook_runs_unchanged_with_equal_ranks(project: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    given = (
        "from pyspark.sql import SparkSession\n"
        "SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        f"CHECKPOINTS = {str(tmp_path / 'checkpoints')!r}\n"
    )
    # Those of a checkout are found by the kernel as those of a wheel would be.
    path = [project / "docker" / "sparkdl", project]
    *_, on_spark, here = executed([given, *NOTEBOOK.split(SEPARATOR)], path, tmp_path)
    for shown in (on_spark.splitlines(), here.splitlines()):
        assert (
            shown.count("[0] weights of the ranks are equal"),
            sum(line.startswith("[0] epoch 2 ends after") for line in shown),
            shown[-1],
        ) == (1, 1, "returned 2")
    # With np < 0 the cell shows all that the ranks print, such as the lines of Keras.
    for rank in (0, 1):
        assert any(line.startswith(f"[{rank}] Epoch 2/2") for line in here.splitlines())
        assert not any(line.startswith(f"[{rank}] Epoch 2/2") for line in on_spark.splitlines())
    assert "weights of the ranks are equal" in (tmp_path / "notebook.html").read_text()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-1.weights.h5",
        "checkpoint-2.weights.h5",
    ]


def test_a_real_sparkdl_comes_first(project: Path, tmp_path: Path) -> None:
    real = tmp_path / "real" / "sparkdl"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("HorovodRunner = 'the real one'\n")
    code = "import sparkdl; from sparkdl import HorovodRunner; print(HorovodRunner, sparkdl.__file__)"
    ours = project / "docker" / "sparkdl"
    assert [run(code, order, tmp_path) for order in ([ours, real.parent], [real.parent, ours])] == [
        f"the real one {real / '__init__.py'}\n"
    ] * 2


def test_it_says_that_groundswell_is_missing(project: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import sparkdl"]  # without the packages of this environment
    variables = {**os.environ, "PYTHONPATH": str(project / "docker" / "sparkdl")}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=patient(60))
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("ModuleNotFoundError: this sparkdl gives old names to Groundswell, which is not installed")


@pytest.mark.long
def test_the_wheel_overwrites_nothing_of_a_real_sparkdl(project: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(project / "docker" / "sparkdl", source)
    built = subprocess.run(
        [shutil.which("pip") or "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        pytest.skip(f"the wheel's build backend cannot be had: {built.stderr.strip().splitlines()[-1:]}")
    (wheel,) = tmp_path.glob("groundswell_sparkdl-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    assert "Requires-Dist" not in zipfile.ZipFile(wheel).read(metadata).decode()
    assert "groundswell_sparkdl/sparkdl/horovod/tensorflow/keras.py" in names
    assert not any(name.startswith("sparkdl/") for name in names)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); import sparkdl; print(sparkdl.HorovodRunner.__module__)"
    assert run(code, [project], tmp_path) == "pipelines.launch.horovod_runner\n"
