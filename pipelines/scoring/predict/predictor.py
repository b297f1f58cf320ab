"""A model loaded in a process of an executor: once, for all tasks that this process runs."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pyspark import TaskContext

from pipelines.scoring.predict.model import ModelDescription

Predict = Callable[[Mapping[str, NDArray[np.generic]]], NDArray[np.float32]]
"""Function from image groups `(batch size, height, width, bands)` to probabilities `(batch size, classes)`."""


@dataclass(frozen=True)
class LoadSettings:
    """What decides a loaded model beside its weights."""

    batch_size: int
    """Number of samples of every call."""
    threads: int
    """Threads of one operation."""


_STDERR = 2
_loaded: dict[tuple[str, LoadSettings], Predict] = {}


def predictor(identity: str, load: Callable[[], Predict], settings: LoadSettings) -> Predict:
    """Give a model, which is loaded where this process does not have it yet; another one is forgotten.

    Args:
        identity: Names the model and its runtime.
        load: Loads it.
        settings: Batch size and threads.
    """
    key = (identity, settings)
    if key not in _loaded:
        forget()
        _loaded[key] = load()
    return _loaded[key]


def forget() -> None:
    """Forget the model of this process."""
    _loaded.clear()


def load_keras(
    model: ModelDescription,
    file: bytes,
    settings: LoadSettings,
    function_of: Callable[[Any], Callable[[Any], Any]] | None = None,
) -> Predict:
    """Load a `.keras` file as one TensorFlow function of a fixed batch size.

    Args:
        model: What it takes and gives.
        file: Content of the `.keras` file.
        settings: Batch size and threads; a process keeps the threads of its first model.
        function_of: Returns what is computed from the model's image groups, given the model; None: its output.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Several workers may share a GPU. By default each takes nearly all its memory at once, and the second one fails.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    use_own_gpu()
    with _quiet_import():
        import keras
        import tensorflow as tf
    with suppress(RuntimeError):  # another model was here before
        tf.config.threading.set_intra_op_parallelism_threads(settings.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(file)
        network = keras.saving.load_model(path, compile=False)
    names = [each.name for each in model.inputs]
    inputs = {
        each.name: tf.TensorSpec((settings.batch_size, *each.shape), each.dtype, each.name) for each in model.inputs
    }
    compute = partial(network, training=False) if function_of is None else function_of(network)
    function = tf.function(lambda images: compute(images), input_signature=[inputs], autograph=False)
    run = function.get_concrete_function()

    def predict(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        tensors = {name: tf.convert_to_tensor(images[name]) for name in names}
        found: NDArray[np.float32] = np.asarray(next(iter(tf.nest.flatten(run(**tensors)))), np.float32)
        return found

    return predict


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Keep TensorFlow's remarks about the processor from the terminal: it writes them before any setting is read."""
    shown, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDERR)
    try:
        yield
    finally:
        os.dup2(shown, _STDERR)
        os.close(shown)
        os.close(nowhere)


def use_own_gpu() -> None:
    """Show TensorFlow the GPU that Spark gave to this task, and no other.

    A process that Spark uses again keeps the GPU of its first task: TensorFlow looks once.
    """
    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    if gpus is not None and "tensorflow" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)


def task_threads(configured: int | None) -> int:
    """Give the threads for a model: those configured, or else the cores of this Spark task."""
    if configured is not None:
        return configured
    context = TaskContext.get()
    return max(1, int(context.cpus())) if context is not None else os.cpu_count() or 1
