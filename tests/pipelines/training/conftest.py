import keras
import numpy as np
import pytest
import tensorflow as tf

from pipelines.dataset.manifest import BandStatistics, Manifest
from pipelines.sample import ImageGroup


class OneRank:
    """The collective of a rank that is alone."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.reduced: set[tf.DType] = set()
        """The dtypes of what was summed over the ranks."""

    def allreduce(self, tensors: list[tf.Tensor], name: str | None = None) -> list[tf.Tensor]:
        self.reduced |= {tensor.dtype for tensor in tensors}
        return tensors

    def alltoall(self, tensor: tf.Tensor, splits: tf.Tensor | None = None, name: str | None = None) -> tf.Tensor:
        return tensor

    def allgather(self, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
        return tensor

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def concatenate(self, values: np.ndarray) -> np.ndarray:
        return values

    def broadcast(self, variables: list[tf.Variable]) -> None: ...

    def broadcast_number(self, number: int) -> int:
        return number


@pytest.fixture
def one_rank() -> OneRank:
    return OneRank()


@pytest.fixture
def tiny_model() -> keras.Model:
    """Two image inputs, one convolution, batch norm, three classes."""
    keras.utils.set_random_seed(0)
    inputs = {"a": keras.Input((6, 6, 2), dtype="uint16", name="a")}
    x = keras.ops.cast(inputs["a"], "float32") / 1000.0
    x = keras.layers.Conv2D(4, 3, use_bias=False, name="conv")(x)
    x = keras.layers.BatchNormalization(name="bn")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(keras.ops.relu(x))
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


@pytest.fixture
def images() -> dict[str, np.ndarray]:
    return {"a": np.random.default_rng(0).integers(0, 3000, (8, 6, 6, 2), dtype=np.uint16)}


@pytest.fixture
def targets() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2, (8, 3)).astype(np.float32)


@pytest.fixture
def manifest() -> Manifest:
    """A dataset of small RGB images of two classes."""
    return Manifest(
        archive="image_folder",
        task="single_label",
        class_names=("water", "land"),
        groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
        splits={},
        statistics={"rgb": BandStatistics(mean=(1.0,) * 3, std=(1.0,) * 3)},
        settings={},
        source_fingerprint="abc",
    )
