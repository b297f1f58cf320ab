"""The exponential moving average of the weights and statistics that training changes in a model."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from pipelines.training.step.accumulation import moving_statistics


class WeightAverage:
    """Averages weights and moving batch-norm statistics over the steps; part of the training step's graph.

        after the first update:   average = value
        after every further one:  average = decay * average + (1 - decay) * value

    For the trainable variables `use_ema` of Keras's optimizers computes the same. Keras does not average the moving
    batch-norm statistics, which would then not fit the averaged weights. Here they are averaged in the same way. Every
    rank averages the statistics of its own batches. Their mean over the ranks is taken together with that of the model.

    Source: Polyak, Juditsky 1992, for averages over the steps; Szegedy et al. 2016, "Rethinking the Inception
    architecture", section 8, for the exponential one of networks.
    """

    def __init__(self, model: keras.Model, decay: float) -> None:
        """Create the averages in float32, which take as much memory as the weights.

        Args:
            model: The model that is trained.
            decay: Fraction of the average that every step keeps, in (0, 1).
        """
        self.decay = decay
        self._averaged = [*model.trainable_variables, *moving_statistics(model)]
        self.variables = [
            keras.Variable(each, dtype=each.dtype, trainable=False, name=f"{each.path.replace('/', '.')}_average")
            for each in self._averaged
        ]
        """The averages, which a checkpoint must contain."""
        self.statistics = self.variables[len(model.trainable_variables) :]
        """The averages of the moving statistics, which differ between ranks until their mean is taken."""

    def update(self, updates: tf.Tensor) -> None:
        """Add the values after an update; `updates` is the number of updates so far, including this one."""
        decay = tf.where(tf.convert_to_tensor(updates) > 1, self.decay, 0.0)
        for variable, average in zip(self._averaged, self.variables, strict=True):
            average.assign(decay * average.value + (1.0 - decay) * variable.value)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Set the model to the averages within the block, and back to its own values at the end."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for variable, average in zip(self._averaged, self.variables, strict=True):
            value = tf.convert_to_tensor(variable.value)
            variable.assign(tf.convert_to_tensor(average.value))
            average.assign(value)
