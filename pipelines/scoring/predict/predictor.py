"""Loads a model once in an executor's process, for all tasks of this process."""

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
from pipelines.spark.connect import SentFile

Predict = Callable[[Mapping[str, NDArray[np.generic]]], NDArray[np.float32]]
"""Function from image groups `(batch size, height, width, bands)` to probabilities `(batch size, classes)`."""

_STDERR = 2
_loaded: dict[tuple[str, int, int], Predict] = {}


def predictor(identity: str, load: Callable[[], Predict], batch_size: int, threads: int) -> Predict:
    """Return a model, and load it if this process does not have it yet; another model is released.

    Args:
        identity: Identifier of the model and its runtime.
        load: Function that loads the model.
        batch_size: Number of samples of every call.
        threads: Number of threads of one operation.
    """
    key = identity, batch_size, threads
    if key not in _loaded:
        forget()
        _loaded[key] = load()
    return _loaded[key]


def forget() -> None:
    """Release the model of this process."""
    _loaded.clear()


@dataclass(frozen=True)
class SentModel:
    """A Keras model in the form that tasks receive."""

    description: ModelDescription
    file: SentFile
    """The `.keras` file."""
    batch_size: int
    threads: int | None
    """Number of threads of one task; None: the cores of the Spark task."""

    def load(self) -> Predict:
        """Return this process's model."""
        threads = task_threads(self.threads)
        return predictor(
            self.description.model_id,
            lambda: load_keras(self.description, self.file.value, self.batch_size, threads),
            self.batch_size,
            threads,
        )


def load_keras(
    model: ModelDescription,
    file: bytes,
    batch_size: int,
    threads: int,
    function_of: Callable[[Any], Callable[[Any], Any]] | None = None,
) -> Predict:
    """Load a `.keras` file as one TensorFlow function of a fixed batch size.

    Args:
        model: Description of the model.
        file: Content of the `.keras` file.
        batch_size: Number of samples of every call.
        threads: Number of threads of one operation; a process keeps the threads of its first model.
        function_of: Function that returns, for the model, what to compute from its image groups; None: its output.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Several workers may share a GPU. By default each allocates nearly all its memory, and the second one fails.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    use_own_gpu()
    with _quiet_import():
        import keras
        import tensorflow as tf
    with suppress(RuntimeError):  # another model has already set them
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    with tempfile.TemporaryDirectory(prefix="groundswell-") as folder:
        path = Path(folder, "model.keras")
        path.write_bytes(file)
        network = keras.saving.load_model(path, compile=False)
    inputs = {each.name: tf.TensorSpec((batch_size, *each.shape), each.dtype, each.name) for each in model.inputs}
    compute = partial(network, training=False) if function_of is None else function_of(network)
    function = tf.function(lambda images: compute(images), input_signature=[inputs], autograph=False)
    run = function.get_concrete_function()

    def predict(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        tensors = {name: tf.convert_to_tensor(images[name]) for name in inputs}
        return np.asarray(next(iter(tf.nest.flatten(run(**tensors)))), np.float32)

    return predict


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Suppress TensorFlow's messages about the processor, which it writes before any setting is read."""
    shown, nowhere = os.dup(_STDERR), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDERR)
    try:
        yield
    finally:
        os.dup2(shown, _STDERR)
        os.close(shown)
        os.close(nowhere)


def use_own_gpu() -> None:
    """Show TensorFlow only the GPU that Spark assigned to this task.

    A process that Spark reuses keeps the GPU of its first task, because TensorFlow looks only once.
    """
    context = TaskContext.get()
    gpus = context.resources().get("gpu") if context is not None else None
    if gpus is not None and "tensorflow" not in sys.modules:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses)


def task_threads(configured: int | None) -> int:
    """Return the number of threads for a model: the configured one, or else the cores of this Spark task."""
    if configured is not None:
        return configured
    context = TaskContext.get()
    return max(1, int(context.cpus())) if context is not None else os.cpu_count() or 1
