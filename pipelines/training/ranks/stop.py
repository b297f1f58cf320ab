"""The agreement of all ranks on the step after which they stop, when a rank was asked to stop."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from pipelines.launch.rank.report import stop_requested
from pipelines.training.ranks.collective import HorovodCollective


class StopAgreement:
    """Counts in every step how many ranks were asked to stop.

    A flag per rank is summed inside the graph of the training step, in addition to the gradients. This small operation
    runs during the backward pass. Every rank reads the same sum of the same step at the same place in its loop, so all
    ranks stop after the same step. No rank waits for another one outside the exchange.
    """

    def __init__(self, collective: HorovodCollective, requested: Callable[[], bool] = stop_requested) -> None:
        """Create the flag.

        Args:
            collective: The ranks.
            requested: Returns whether this rank was asked to stop.
        """
        self._collective = collective
        self._requested = requested
        self.is_announced = False
        """Whether this rank was asked to stop before the start of its latest step."""
        with tf.device("CPU:0"):
            self._flag = tf.Variable(0.0, trainable=False, name="stop_requested")
            self._requests = tf.Variable(0.0, trainable=False, name="stop_requests")

    def announce(self) -> None:
        """Set this rank's flag if the rank was asked to stop; called before each step."""
        if not self.is_announced and self._requested():
            self.is_announced = True
            self._flag.assign(1.0)

    def hear(self) -> None:
        """Record that some rank was asked to stop; used if steps exchange no flags."""
        self._requests.assign(1.0)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def exchange(self) -> tf.Tensor:
        """Sum the flags and return the sum; part of the training step's graph."""
        with tf.device("CPU:0"):
            (requests,) = self._collective.allreduce([self._flag.read_value()], "stop_requests")
            self._requests.assign(requests)
            return requests

    def requests(self) -> tf.Tensor:
        """Return the number of ranks that were asked to stop before the latest step, without waiting for the step."""
        return self._requests.read_value()

    def forget(self) -> None:
        """Reset the latest sum; ranks that continue from an earlier step exchange their flags again."""
        self._requests.assign(0.0)

    def is_requested_now(self) -> bool:
        """Return whether any rank was asked to stop; all ranks call this together, outside a step."""
        return int(self._collective.sum(np.array([int(self._requested())]))[0]) > 0
