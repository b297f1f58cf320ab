"""The inputs of a training step, made from a batch, and the mixup of its samples."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.layers.augmentation import mix_pairs, mixing_coefficients
from models.layers.grids import Size
from pipelines.dataset.read.reader import Batch
from pipelines.training.step.tensors import image_tensors


@dataclass(frozen=True)
class Mixing:
    """Mixes images and targets of one epoch's batches in pairs of samples."""

    alpha: float
    seed: int
    epoch: int

    def __call__(
        self, images: dict[str, tf.Tensor], targets: tf.Tensor, rows: NDArray[np.int64]
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Return mixed images and targets.

        Args:
            images: Images by group, `(batch, height, width, bands)` in the stored dtype.
            targets: Targets in float32, `(batch, classes)`.
            rows: Row of each sample, `(batch,)`.
        """
        coefficients = tf.convert_to_tensor(
            mixing_coefficients(self.alpha, seed=self.seed, epoch=self.epoch, rows=rows)
        )
        return {name: _mix(group, coefficients) for name, group in images.items()}, _mix(targets, coefficients)


_mix = tf.function(mix_pairs, autograph=False)


Inputs = (
    tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor | None]
    | tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor | None, Size]
)
"""The images, targets and seeds of a batch, and the size to which the model resizes the images."""


@dataclass(frozen=True)
class StepInputs:
    """Makes the inputs of a training step from a batch."""

    seeds_of: Callable[[NDArray[np.int64]], NDArray[np.int32]] | None = None
    """Returns the seeds of the augmentation from the rows of a batch; None: the model does not augment."""
    mixing: Mixing | None = None
    """Mixes the samples; None: the samples do not change."""
    size: Size | None = None
    """Height and width at which the network is trained; None: the model does not resize."""

    def __call__(self, batch: Batch) -> Inputs:
        """Return images, targets and augmentation seeds, and the size if the model resizes."""
        seeds = None if self.seeds_of is None else tf.convert_to_tensor(self.seeds_of(batch.rows))
        images, targets = image_tensors(batch.images), tf.convert_to_tensor(batch.targets, tf.float32)
        if self.mixing is not None:
            images, targets = self.mixing(images, targets, batch.rows)
        return (images, targets, seeds) if self.size is None else (images, targets, seeds, self.size)
