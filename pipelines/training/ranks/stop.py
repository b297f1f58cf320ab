"""How all ranks agree on the step after which they stop, when one of them was asked to."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from pipelines.launch.rank.report import stop_requested
from pipelines.training.ranks.collective import HorovodCollective


class StopAgreement:
    """Counts in every step how many ranks were asked to stop.

    A flag per rank is summed inside the graph of the training step, beside the gradients: one more small operation,
    which travels while the backward pass computes. Every rank reads the same sum of the same step at the same place of
    its loop, so all stop after the same step. No rank waits for another one outside the exchange.
    """

    def __init__(self, collective: HorovodCollective, requested: Callable[[], bool] = stop_requested) -> None:
        """Create the flag.

        Args:
            collective: The ranks.
            requested: Returns whether this rank was asked to stop.
        """
        self._collective = collective
        self._requested = requested
        self._announced = False
        with tf.device("CPU:0"):
            self._flag = tf.Variable(0.0, trainable=False, name="stop_requested")
            self._requests = tf.Variable(0.0, trainable=False, name="stop_requests")

    def announce(self) -> None:
        """Set this rank's flag if it was asked to stop; called before each step."""
        if not self._announced and self._requested():
            self._announced = True
            self._flag.assign(1.0)

    @property
    def is_announced(self) -> bool:
        """Whether this rank was asked to stop before its latest step began."""
        return self._announced

    def hear(self) -> None:
        """Take note that some rank was asked to stop, where steps exchange no flags."""
        self._requests.assign(1.0)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def exchange(self) -> tf.Tensor:
        """Sum the flags, and return the sum; part of the training step's graph."""
        with tf.device("CPU:0"):
            (requests,) = self._collective.allreduce([self._flag.read_value()], "stop_requests")
            self._requests.assign(requests)
            return requests

    def requests(self) -> tf.Tensor:
        """Number of ranks that were asked to stop before the latest step; does not wait for the step."""
        return self._requests.read_value()

    def forget(self) -> None:
        """Forget the latest sum; ranks that continue from an earlier step exchange their flags again."""
        self._requests.assign(0.0)

    def is_requested_now(self) -> bool:
        """Whether any rank was asked to stop; every rank calls this together, outside a step."""
        return int(self._collective.sum(np.array([int(self._requested())]))[0]) > 0
