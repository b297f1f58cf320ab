"""The estimate of a rank's memory needs, and the error text when a rank runs out of memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conf.sections.training import TrainingConfig
from models.layers.augmentation import AugmentedModel
from pipelines.dataset.format.manifest import Manifest
from pipelines.launch.rank import membership
from pipelines.training.finders.batches import FRACTION, smaller_batch
from pipelines.training.memory.memory import MemoryLimit, Needs, memory_limit, resident_peak
from pipelines.training.ranks.collective import rank_of_job, ranks_on_host
from pipelines.training.ranks.events import MemoryNeeded, tell
from pipelines.training.setup.rank_setup import RankSetup
from pipelines.training.step.mode import Mode


def estimate(
    model: keras.Model,
    mode: Mode,
    manifest: Manifest,
    *,
    accumulates: bool,
) -> Needs:
    """Estimate the memory needs of a rank; an image side that a network does not fix counts as 1.

    Args:
        model: The model that is trained.
        mode: Its training mode, with optimizer and exchange.
        manifest: Manifest of the dataset; a batch has its image groups.
        accumulates: Whether gradients are summed over micro-batches, which needs their memory twice.
    """
    gradients = 4 * sum(math.prod(variable.shape) for variable in model.trainable_variables)  # float32
    images = sum(math.prod(group.shape) * np.dtype(group.dtype).itemsize for group in manifest.groups)
    network = model.network if isinstance(model, AugmentedModel) else model
    of_optimizer = {id(variable) for variable in mode.optimizer.variables}
    of_mode = [each for each in (*mode.shared, *mode.own, *mode.between) if id(each) not in of_optimizer]
    outputs = sum(math.prod(side or 1 for side in each.shape[1:]) * _size_of(each.dtype) for each in _outputs(network))
    return Needs(
        weights=_bytes(model.variables),
        gradients=gradients * (2 if accumulates else 1),
        optimizer=_bytes(mode.optimizer.variables),
        exchange=_bytes([entry.variable for entry in mode.exchange.state]),
        sample=images + outputs,
        mode=_bytes(of_mode),
    )


def _outputs(network: Any) -> Iterator[Any]:
    """Yield the outputs of all operations of a functional model, including nested ones."""
    for operation in getattr(network, "operations", network.layers):
        if hasattr(operation, "operations"):
            yield from _outputs(operation)
            continue
        # A layer has no single output if its model is not functional or if it is used twice.
        with suppress(AttributeError, ValueError):
            yield from keras.tree.flatten(operation.output)


def _bytes(variables: Any) -> int:
    return sum(math.prod(variable.shape) * _size_of(variable.dtype) for variable in variables)


def _size_of(dtype: Any) -> int:
    return int(tf.as_dtype(dtype).size)


class Shortage:
    """The known memory needs of a rank, for the error text if its memory runs out."""

    def __init__(self, training: TrainingConfig) -> None:
        """Start without needs, because there is no model yet."""
        self._training = training
        self._needs: Needs | None = None
        self._limit: MemoryLimit | None = None

    def know(self, setup: RankSetup, mode: Mode) -> None:
        """Estimate the needs of the model; rank 0 sends them to the driver, because a killed rank sends nothing.

        Args:
            setup: The setup of the rank.
            mode: Its training mode.
        """
        self._needs = estimate(setup.model, mode, setup.manifest, accumulates=setup.micro_batches > 1)
        with suppress(RuntimeError):  # nvidia-smi does not answer
            self._limit = memory_limit(ranks_on_host())
        if setup.collective.rank == 0 and not membership.is_spare():
            tell(MemoryNeeded(needs=self._needs, limit=self._limit))

    def has_room(self) -> bool:
        """Estimate whether this spare can compute a step at the same time as its rank; never on a GPU."""
        needs, limit = self._needs, self._limit
        if needs is None or limit is None or tf.config.get_visible_devices("GPU"):
            return False
        # This process uses as much memory as a rank before its first step.
        each = resident_peak() + needs.gradients + self._training.batch_size_per_worker * needs.sample
        states = 2 * (needs.weights + needs.optimizer + needs.exchange)  # the in-memory checkpoints that both share
        return 2 * each + states <= FRACTION * limit.bytes

    def text(self) -> str:
        """Return the error text for a rank that has run out of memory."""
        begin = f"rank {rank_of_job()} ran out of memory"
        if self._needs is None:
            return f"{begin} before it had a model, whatever the batch is: choose a smaller model or more memory"
        return f"{begin} with {smaller_batch(self._training, self._needs, self._limit)}"


@contextmanager
def shortage_explained(training: TrainingConfig) -> Iterator[Shortage]:
    """Explain an error of memory: name rank, batch and needs of the model, and a batch that would fit.

    Raises:
        MemoryError: Memory ran out. This error replaces that of TensorFlow, or one with less information.
    """
    shortage = Shortage(training)
    try:
        yield shortage
    except (tf.errors.ResourceExhaustedError, MemoryError):
        text = shortage.text()
    else:
        return
    # Outside the handler, so that the error does not include TensorFlow's trace of the graph.
    raise MemoryError(text)
