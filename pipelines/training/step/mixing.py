"""The mixup of a rank's batches."""

from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from models.layers.augmentation import mix_pairs, mixing_coefficients


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
        drawn = mixing_coefficients(self.alpha, seed=self.seed, epoch=self.epoch, rows=rows)
        coefficients = tf.convert_to_tensor(drawn)
        return {name: _mix(group, coefficients) for name, group in images.items()}, _mix(targets, coefficients)


_mix = tf.function(mix_pairs, autograph=False)
