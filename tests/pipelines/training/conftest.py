from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from mlflow import MlflowClient

from conf.load import resolve
from models.losses import classification_loss
from pipelines.dataset.format.manifest import BandStatistics, Manifest
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.checkpoints import Checkpoints
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.modes.synchronous import Synchronous
from pipelines.training.setup.recipe import make_exchange
from pipelines.training.step.accumulation import Accumulation
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.step import make_accumulate, make_train_step
from pipelines.training.step.weight_average import WeightAverage
from tests.pipelines.training.manifests import rgb_manifest


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


class Training:
    """A copy of a model that is trained by SGD, and its checkpoints."""

    def __init__(
        self,
        original: keras.Model,
        folder: Path,
        one_rank: Any,
        *,
        codec: str = "none",
        micro_batches: int = 1,
        ema: float | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self.model, loss = keras.models.clone_model(original), classification_loss("multi_label")
        self.model.set_weights(original.get_weights())
        # Keras averages the trainable variables too: this is what ours must equal.
        averages: dict[str, Any] = {"use_ema": True, "ema_momentum": ema} if ema else {}
        self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="sgd", **averages)
        self.optimizer.build(self.model.trainable_variables)
        exchange = make_exchange(resolve("smoke", [f"exchange.codec={codec}", "exchange.dense_below=0"]), one_rank)
        self._micro_batches = micro_batches
        sums: Any = Accumulation(self.model, micro_batches) if micro_batches > 1 else None
        self.average: Any = WeightAverage(self.model, ema) if ema else None
        self._accumulate = make_accumulate(self.model, loss, sums, jit_compile=False)
        self._update = make_train_step(
            self.model,
            loss,
            self.optimizer,
            exchange,
            Synchronous(self.optimizer, exchange),
            jit_compile=False,
            accumulation=sums,
            average=self.average,
            loss_scale=scale,
        )
        self.variables = [*self.model.variables, *self.optimizer.variables]
        self.variables += self.average.variables if ema else []
        initial = TrainingState(0, 0, 0, 8, "run", "data", [])
        self.checkpoints = Checkpoints(Location.at(folder), initial, self.variables, exchange, one_rank)

    def step(self, images: dict[str, np.ndarray], targets: np.ndarray, number: int = 0) -> float:
        """Take a step with images that are turned by so many rows; its loss."""
        *earlier, last = [
            ({name: tf.constant(np.roll(group, number, axis=1)[rows]) for name, group in images.items()}, targets[rows])
            for rows in np.split(np.arange(len(targets)), self._micro_batches)
        ]
        for batch, truth in earlier:
            self._accumulate(batch, tf.constant(truth))
        return float(self._update(last[0], tf.constant(last[1])))

    @property
    def values(self) -> list[np.ndarray]:
        return [np.array(variable) for variable in self.variables]


@pytest.fixture
def make_training(tiny_model: keras.Model, tmp_path: Path, one_rank: OneRank) -> Callable[..., Training]:
    return lambda **settings: Training(tiny_model, tmp_path, one_rank, **settings)


@pytest.fixture
def client(module_mlflow_store: str) -> MlflowClient:
    """Reads the store of this module, which is in use."""
    return MlflowClient(module_mlflow_store)


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
    return rgb_manifest(statistics={"rgb": BandStatistics(mean=(1.0,) * 3, std=(1.0,) * 3)})
