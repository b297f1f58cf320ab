"""Horovod's callbacks for Keras 3 and tf_keras; `repairs` gives them the base class of the Keras in use."""

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from pipelines.launch.keras_door.keras_3 import native, shared


class BroadcastGlobalVariables:
    """Sends the weights of the model and the variables of its optimizer from one rank to all others, once.

    The callback does this before the first step if the model has its weights on every rank, and otherwise after it.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """Choose the rank that sends.

        Args:
            root_rank: The rank that sends.
            device: Name of the TensorFlow device of the operations; empty: TensorFlow chooses.
            local_variables: One or several variables that keep their own value on every rank.
        """
        super().__init__()
        self.root_rank, self.device, self.broadcast_done = root_rank, device, False
        if local_variables is None:
            local_variables = []
        elif not isinstance(local_variables, Sequence | set):
            local_variables = [local_variables]
        self._local = {native(variable).ref() for variable in local_variables}

    def register_local_var(self, var: Any) -> None:
        """Let every rank keep its own value of this variable."""
        self._local.add(native(var).ref())

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast if every rank has its weights."""
        # A rank that has loaded a checkpoint has weights, while the others may have none yet.
        ready = hvd.allreduce(tf.constant(float(_has_weights(self.model))), op=hvd.Sum, name="BroadcastReady")
        if not self.broadcast_done and int(ready) == hvd.size():
            if not self.model.optimizer.built:
                self.model.optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first step if this was not possible before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer.variables
        everything = [*self.model.weights, *(optimizer() if callable(optimizer) else optimizer)]
        with tf.device(self.device):
            hvd.broadcast_variables(
                [variable for variable in shared(everything) if variable.ref() not in self._local],
                root_rank=self.root_rank,
            )
        self.broadcast_done = True


class MetricAverage:
    """Replaces the metrics of each epoch by their mean over the ranks, also for later callbacks in the list."""

    def __init__(self, device: str = "") -> None:
        """Choose the TensorFlow device of the operations by name; empty: TensorFlow chooses."""
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the values of `logs` in place."""
        if not logs:
            return
        names = sorted(logs)
        with tf.device(self.device):
            own = tf.constant([float(logs[name]) for name in names], tf.float64)
            means = hvd.allreduce(own, op=hvd.Average, name=f"MetricAverage_{'_'.join(names)}").numpy()
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateSchedule:
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` until `end_epoch`."""

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Describe the schedule.

        Args:
            initial_lr: Learning rate at the multiplier 1.
            multiplier: A function of the epoch, or a factor per epoch since `start_epoch`.
            start_epoch: First epoch of the schedule.
            end_epoch: First epoch after the schedule; None: the schedule continues to the end.
            staircase: Whether the rate changes only at the first step of an epoch. Otherwise it changes at every step,
                and `multiplier` gets a fractional epoch.
            momentum_correction: Whether to scale the velocity of SGD and RMSprop with the rate, which it contains.
            steps_per_epoch: Number of steps of an epoch; None: Keras knows it.

        Raises:
            ValueError: `initial_lr` is None.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.current_epoch = 0
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the number of steps of an epoch if it is needed.

        Raises:
            ValueError: Neither Keras nor the caller gives the number.
        """
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Keras does not know the number of steps of an epoch: pass steps_per_epoch to "
                    f"{type(self).__name__}"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of this step."""
        inside = self.current_epoch >= self.start_epoch
        if not inside or (self.end_epoch is not None and self.current_epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics as `lr`."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = _rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and before and after != before:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (after / before))


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr` over the first epochs, step by step.

    Source: Goyal et al. (2017), "Accurate, Large Minibatch SGD", section 2.2.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Describe the warm-up over `warmup_epochs` as in `LearningRateSchedule`; `verbose` prints its end."""
        super().__init__(
            initial_lr,
            self._share,
            end_epoch=warmup_epochs,  # type: ignore[arg-type]
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._warmup_epochs, self.verbose = warmup_epochs, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the rate, and print the end of the warm-up if `verbose`."""
        super().on_epoch_end(epoch, logs)
        if epoch == self._warmup_epochs - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = _rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")  # noqa: T201

    def _share(self, epoch: float) -> float:
        # The last step of the warm-up has the full rate.
        assert self.steps_per_epoch is not None
        done = (epoch + 1 / self.steps_per_epoch) / self._warmup_epochs
        return float((done * (hvd.size() - 1) + 1) / hvd.size())


CALLBACKS: dict[str, type] = {
    "BroadcastGlobalVariablesCallback": BroadcastGlobalVariables,
    "MetricAverageCallback": MetricAverage,
    "LearningRateScheduleCallback": LearningRateSchedule,
    "LearningRateWarmupCallback": LearningRateWarmup,
}
"""The classes by their names in Horovod."""


def _has_weights(model: Any) -> bool:
    # An optimizer of tf_keras cannot say whether it has its variables: `built` is new in Keras 3.
    return bool(model.built and model.weights and hasattr(model.optimizer, "built"))


def _rate(optimizer: Any) -> float:
    return float(native(optimizer.learning_rate))


def _velocities(optimizer: Any) -> list[Any]:
    """Return the variables of SGD and RMSprop with a moving sum of updates, each multiplied by its learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    attribute = {"SGD": "momentums", "RMSprop": "_momentums"}.get(type(inner).__name__, "")
    return list(getattr(inner, attribute, None) or [])
