"""Horovod's own examples under the launcher, as their authors wrote them but shorter; the changes are in the table.

No source distribution of Horovod holds its examples (0.11.3, 0.16.4, 0.19.5, 0.23.0, 0.27.0 and 0.28.1 were looked at):
they are taken from its repository, or from the folder `HOROVOD_EXAMPLES`.
"""

import hashlib
import io
import os
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from pipelines.launch.runner import BarrierRunner

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(280)]

_ARCHIVE = "https://github.com/horovod/horovod/archive/refs/tags/v0.28.1.tar.gz"
_SHORT = ["--model", "MobileNet", "--batch-size", "2", "--num-batches-per-iter", "1", "--num-iters", "2", "--no-cuda"]
EXAMPLES: dict[str, tuple[dict[str, str], list[str]]] = {
    "tensorflow2/tensorflow2_keras_mnist.py": ({"500 // hvd.size()": "4", "epochs=24": "epochs=4"}, []),
    # A property since Keras 3.
    "tensorflow2/tensorflow2_mnist.py": ({"10000 // hvd.size()": "4", "opt.variables()": "opt.variables"}, []),
    "tensorflow2/tensorflow2_keras_synthetic_benchmark.py": ({}, _SHORT),
}
"""What is replaced in the text, and the arguments."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "HOROVOD_EXAMPLES" in os.environ:
        return Path(os.environ["HOROVOD_EXAMPLES"])
    folder = tmp_path_factory.mktemp("horovod")
    try:
        with urllib.request.urlopen(_ARCHIVE, timeout=60) as answer:
            data = io.BytesIO(answer.read())
    except OSError as error:
        pytest.skip(f"Horovod's examples cannot be fetched: {error}")
    with tarfile.open(fileobj=data) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir()) / "examples"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with a small stand-in for MNIST, of which every rank has a file of its own."""
    folder = tmp_path_factory.mktemp("home")
    datasets = folder / ".keras" / "datasets"
    datasets.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {f"x_{name}": rng.integers(0, 256, (256, 28, 28), np.uint8) for name in ("train", "test")}
    arrays |= {f"y_{name}": rng.integers(0, 10, 256, np.uint8) for name in ("train", "test")}
    for name in ("mnist.npz", "mnist-0.npz", "mnist-1.npz"):
        np.savez(datasets / name, **arrays)
    return folder


def run_example(text: str, arguments: list[str], home: str) -> str:
    """Run it in this rank; a digest of the weights that its model has in the end."""
    import gc
    import sys

    import keras
    from keras.src.datasets import mnist

    # The stand-in has another checksum than MNIST.
    mnist.get_file = lambda fname, **_: f"{home}/.keras/datasets/{fname}"
    sys.argv = ["example.py", *arguments]
    names = {"__name__": "__main__"}
    exec(compile(text, "example.py", "exec"), names)
    digest = hashlib.sha256()
    for model in gc.get_objects():
        if isinstance(model, keras.Model):
            for weight in model.trainable_variables:  # each rank has batch-norm statistics of its own batches
                digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(examples: Path, home: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples write checkpoints where they are started
    replaced, arguments = EXAMPLES[name]
    text = (examples / name).read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    first, second = BarrierRunner(None, 2).run_all(run_example, text, arguments, str(home))
    assert first == second != hashlib.sha256().hexdigest()
