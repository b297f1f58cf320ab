"""Functions of tests on real rings of ranks."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from pipelines.launch.runner import BarrierRunner


def on_ring(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function of a test's module on every rank of a new ring; return each rank's value.

    Ranks are forks of one interpreter: a new ring takes a second, and begins without names, seeds and residuals that
    an earlier one has left. Each rank has one thread, so that sums do not depend on the number of cores.
    """
    # Neither module can be imported in a rank: their functions travel as code.
    for name in (function.__module__, __name__):
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return BarrierRunner(None, ranks, threads_per_worker=1, on_log=lambda rank, line: None).run_all(function, *args)


class Trainee:
    """A rank that trains a small network on fixed batches."""

    def __init__(self) -> None:
        from pipelines.training.ranks.collective import HorovodCollective

        self.collective: Any = HorovodCollective()

    def model(self) -> Any:
        """The network, with the same weights each time."""
        import keras

        keras.utils.set_random_seed(0)
        inputs = keras.Input((8, 8, 3), name="bands")
        features = keras.layers.Conv2D(8, 3, activation="relu")(inputs)
        return keras.Model({"bands": inputs}, keras.layers.Dense(4)(keras.layers.Flatten()(features)))

    def batches(self, steps: int, ranks: int, *, same: bool = False) -> list[tuple[Any, Any]]:
        """This rank's batches of those of some ranks, or rank 0's on every rank."""
        import tensorflow as tf

        random, rank, drawn = np.random.default_rng(1), 0 if same else self.collective.rank, []
        for _ in range(steps):
            images = random.standard_normal((ranks, 8, 8, 8, 3)).astype(np.float32)
            targets = random.integers(0, 2, (ranks, 8, 4)).astype(np.float32)
            drawn.append(({"bands": tf.constant(images[rank])}, tf.constant(targets[rank])))
        return drawn

    def begin(self, settings: Sequence[str], rate: float, steps: int, micro_batches: int = 1) -> tuple[Any, Any]:
        """The network and the mode of these settings before its first step, with a constant learning rate."""
        from conf.load import resolve
        from models.losses import classification_loss
        from pipelines.training.ranks.stop import StopAgreement
        from pipelines.training.setup.recipe import make_mode

        config, model = resolve("smoke", settings), self.model()
        stop, loss = StopAgreement(self.collective, requested=lambda: False), classification_loss("multi_label")
        mode = make_mode(
            config, model, loss, self.collective, steps_per_epoch=steps, micro_batches=micro_batches, stop=stop
        )
        mode.begin(0)
        mode.optimizer.learning_rate = rate
        return model, mode

    def gradients(self, model: Any, images: Any, targets: Any) -> list[np.ndarray]:
        """This rank's gradients of the mean loss, in float64."""
        import tensorflow as tf

        from models.losses import classification_loss

        with tf.GradientTape() as tape:
            value = tf.reduce_mean(classification_loss("multi_label")(targets, model(images, training=True)))
        weights = [variable.value for variable in model.trainable_variables]
        return [np.array(each, np.float64) for each in tape.gradient(value, weights)]
