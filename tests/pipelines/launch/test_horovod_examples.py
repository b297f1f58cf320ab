"""Horovod's own examples under the launcher, as their authors wrote them but shorter; the changes are in the table.

No source distribution of Horovod holds its examples (0.11.3, 0.16.4, 0.19.5, 0.23.0, 0.27.0 and 0.28.1 were looked at):
they are taken from its repository, or from the folder `HOROVOD_EXAMPLES`.
"""

import hashlib
import io
import os
import sys
import tarfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.launch.runner import BarrierRunner
from tests.patience import patient

pytestmark = [pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(280)]

_ARCHIVE = "https://github.com/horovod/horovod/archive/refs/tags/v0.28.1.tar.gz"
_SHORT = ["--model", "MobileNet", "--batch-size", "2", "--num-batches-per-iter", "1", "--num-iters", "2", "--no-cuda"]
_PIN = {  # the GPU of this rank, without a session of TensorFlow 1
    "tf.ConfigProto()": "tf.compat.v1.ConfigProto()",
    "K.set_session(tf.Session(config=config))": (
        "tf.config.set_visible_devices(tf.config.list_physical_devices('GPU')[hvd.local_rank():][:1], 'GPU')"
    ),
}
EXAMPLES: dict[str, tuple[dict[str, str], list[str]]] = {
    "tensorflow2/tensorflow2_keras_mnist.py": (
        {
            "from tensorflow.keras.optimizers import legacy as optimizers": "from tensorflow.keras import optimizers",
            "500 // hvd.size()": "4",
            "epochs=24": "epochs=4",
        },
        [],
    ),
    # A property since Keras 3.
    "tensorflow2/tensorflow2_mnist.py": ({"10000 // hvd.size()": "4", "opt.variables()": "opt.variables"}, []),
    "tensorflow2/tensorflow2_keras_synthetic_benchmark.py": ({}, _SHORT),
    "tensorflow2/tensorflow2_synthetic_benchmark.py": (
        {"opt.variables()": "opt.variables"},
        [*_SHORT, "--num-warmup-batches", "1"],
    ),
    "keras/keras_mnist.py": (_PIN, []),
    "keras/keras_mnist_advanced.py": (
        {
            **_PIN,
            "from keras.preprocessing.image": "from tensorflow.keras.preprocessing.image",
            "Adadelta(lr=": "Adadelta(learning_rate=",
            "fit_generator(": "fit(",
        },
        ["--batch-size", "32", "--epochs", "6"],
    ),
    "keras/keras_imagenet_resnet50.py": (
        {
            **_PIN,
            "from keras.preprocessing import image": "from tensorflow.keras.preprocessing import image",
            "SGD(lr=": "SGD(learning_rate=",
            "fit_generator(": "fit(",
            "workers=4,\n": "\n",
            "evaluate_generator(test_iter, len(test_iter), workers=4)": "evaluate(test_iter, steps=len(test_iter))",
        },
        [
            *("--train-dir", "{home}/imagenet/train", "--val-dir", "{home}/imagenet/validation"),
            *("--batch-size", "2", "--val-batch-size", "2", "--epochs", "2", "--warmup-epochs", "1"),
        ],
    ),
    "pytorch/pytorch_mnist.py": ({}, ["--epochs", "2", "--no-cuda"]),
    "pytorch/pytorch_synthetic_benchmark.py": (
        {"norm_layer=hvd.SyncBatchNorm": ""},  # works on GPUs only
        [*("--batch-size", "2", "--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--num-iters", "2")],
    ),
}
"""What is replaced in the text, and the arguments; `{home}` is the folder of the stand-ins."""


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "HOROVOD_EXAMPLES" in os.environ:
        return Path(os.environ["HOROVOD_EXAMPLES"])
    folder = tmp_path_factory.mktemp("horovod")
    try:
        with urllib.request.urlopen(_ARCHIVE, timeout=patient(60)) as answer:
            data = io.BytesIO(answer.read())
    except OSError as error:
        pytest.skip(f"Horovod's examples cannot be fetched: {error}")
    with tarfile.open(fileobj=data) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir()) / "examples"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with small stand-ins for MNIST, of which every rank has a file of its own, and for ImageNet."""
    folder = tmp_path_factory.mktemp("home")
    datasets = folder / ".keras" / "datasets"
    datasets.mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays = {f"x_{name}": rng.integers(0, 256, (256, 28, 28), np.uint8) for name in ("train", "test")}
    arrays |= {f"y_{name}": rng.integers(0, 10, 256, np.uint8) for name in ("train", "test")}
    for name in ("mnist.npz", "mnist-0.npz", "mnist-1.npz"):
        np.savez(datasets / name, **arrays)
    for part in ("train", "validation"):
        for number in range(1000):  # the classes of ResNet-50
            image = folder / "imagenet" / part / f"n{number:03}" / "image.jpeg"
            image.parent.mkdir(parents=True)
            if number < 4:
                Image.fromarray(rng.integers(0, 256, (64, 80, 3), np.uint8)).save(image)
    return folder


def digest_of(weights: Iterable[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()


def run_example(text: str, arguments: list[str], home: str) -> str:
    """Run it in this rank; a digest of the weights that it has trained."""
    import keras
    from keras.src.datasets import mnist

    # The stand-in has another checksum than MNIST.
    mnist.get_file = lambda fname, **_: f"{home}/.keras/datasets/{fname}"
    trained, build = [], keras.optimizers.Optimizer.build

    def remember(optimizer: Any, variables: Any) -> None:
        trained.extend(variables)
        build(optimizer, variables)

    keras.optimizers.Optimizer.build = remember
    sys.argv = ["example.py", *arguments]
    exec(compile(text, "example.py", "exec"), {"__name__": "__main__"})
    # Each rank has batch-norm statistics of its own batches.
    return digest_of(weight.numpy() for weight in trained)


def run_torch_example(text: str, arguments: list[str], home: str) -> str:
    """Run it in this rank, with a stand-in for torchvision; a digest of the weights that its optimizer has in the end.

    The stand-in has a small network, and the digits of `home`.
    """
    import horovod.torch as hvd
    import torch
    from torch import nn

    def resnet50() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(4, 1000))

    def digits(_: str, train: bool = True, **__: object) -> torch.utils.data.Dataset:
        name = "train" if train else "test"
        arrays = np.load(f"{home}/.keras/datasets/mnist.npz")
        images = torch.tensor(arrays[f"x_{name}"])[:, None] / 255
        return torch.utils.data.TensorDataset(images, torch.tensor(arrays[f"y_{name}"].astype(np.int64)))

    vision: Any = ModuleType("torchvision")
    vision.models, vision.datasets = SimpleNamespace(resnet50=resnet50), SimpleNamespace(MNIST=digits)
    vision.transforms = SimpleNamespace(Compose=list, ToTensor=list, Normalize=lambda *_: None)
    sys.modules["torchvision"] = vision
    os.environ["HOME"] = home  # where an example has a lock
    optimizers, wrap = [], hvd.DistributedOptimizer

    def remember(*args: object, **options: object) -> torch.optim.Optimizer:
        optimizers.append(wrap(*args, **options))
        return optimizers[-1]

    hvd.DistributedOptimizer = remember
    sys.argv = ["example.py", *arguments]
    exec(compile(text, "example.py", "exec"), {"__name__": "__main__"})
    parameters = [parameter for group in optimizers[0].param_groups for parameter in group["params"]]
    return digest_of(parameter.detach().numpy() for parameter in parameters)


def shortened(text: str, replaced: dict[str, str]) -> str:
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(examples: Path, home: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_example
    if name.startswith("pytorch/"):
        pytest.importorskip("torch")
        pytest.importorskip("horovod.torch", reason="Horovod was built without PyTorch", exc_type=ImportError)
        run = run_torch_example
    monkeypatch.chdir(tmp_path)  # examples write checkpoints where they are started
    replaced, arguments = EXAMPLES[name]
    text = shortened((examples / name).read_text(), replaced)
    arguments = [argument.format(home=home) for argument in arguments]
    first, second = BarrierRunner(None, 2).run_all(run, text, arguments, str(home))
    assert first == second != digest_of([])
