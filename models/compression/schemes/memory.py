"""What a rank keeps of its own gradients from one step to the next, and adds to the following one."""

from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from models.compression.codec import Memory, Shape, Slot

Clear = Callable[[tf.Tensor], tf.Tensor]


class WorkerMemory(Protocol):
    """Corrects a gradient before it is encoded and takes up what the payload left out."""

    def slots(self, shape: Shape, *, dense: bool) -> dict[str, Slot]:
        """The state of one tensor; `dense` where it never travels compressed."""
        ...

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """What to encode in place of the gradient, but for the slot "residual", which is added where there is one."""
        ...

    def keep(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """Take up the remainder: what was encoded minus what was sent.

        Args:
            remainder: Shaped as the gradient.
            clear: Returns a tensor of that shape with zeros where elements were sent exactly.
            memory: As `advance` left it.
        """
        ...

    def finish(self, result: tf.Tensor, memory: Memory) -> Memory:
        """See the result, equal on every rank."""
        ...

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """See `Codec.after_dense`."""
        ...


class NoMemory:
    """What is not sent is lost: for codecs without bias, or to show what error feedback is for."""

    def slots(self, shape: Shape, *, dense: bool) -> dict[str, Slot]:
        """None."""
        return {}

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """The gradient."""
        return gradient, memory

    def keep(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """Nothing."""
        return memory

    def finish(self, result: tf.Tensor, memory: Memory) -> Memory:
        """Nothing."""
        return memory

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """The mean."""
        return mean, memory


class ErrorFeedback(NoMemory):
    """What was not sent is added to the next gradient.

        p = g + residual;  send Q(p);  residual = p - Q(p)

    So that, over any number of steps, all that was sent and the residual sum to all gradients.

    Source: Seide et al. 2014, section 3.1; Karimireddy et al. 2019. The residual's change of unit with the learning
    rate: Zheng et al. 2019.
    """

    def slots(self, shape: Shape, *, dense: bool) -> dict[str, Slot]:
        """The residual."""
        return {} if dense else {"residual": Slot(shape, "worker")}

    def keep(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """The remainder is the residual."""
        return {**memory, "residual": remainder}


class MomentumCorrection(NoMemory):
    """Error feedback on velocities instead of gradients.

        u = momentum * u + g;  v = v + u            (Nesterov: u = momentum * (u + g);  v = v + u + g)
        send Q(v);  v = v - Q(v);  where something was sent: u = 0    (masking)

    Without masking, all that was sent and v sum to what momentum SGD would have applied. With it, momentum stops where
    an element was just sent, which at high densities erases most of it: at density 1 nothing but the gradient is left.

    Source: Lin et al. 2018, sections 3.1 and 3.2; the Nesterov form is that of the authors' code.
    """

    def __init__(self, momentum: float, *, nesterov: bool, masking: bool) -> None:
        """Keep the settings; see the class."""
        self.momentum = momentum
        self.nesterov = nesterov
        self.masking = masking

    def slots(self, shape: Shape, *, dense: bool) -> dict[str, Slot]:
        """u, and v as the residual."""
        velocity = {"velocity": Slot(shape, "worker")}
        return velocity if dense else velocity | {"residual": Slot(shape, "worker")}

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """By what this gradient advances v, the residual."""
        step, velocity = self._step(gradient, memory["velocity"])
        return step, {**memory, "velocity": velocity}

    def keep(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """V without what was sent, u without the places."""
        velocity = memory["velocity"]
        if self.masking:
            velocity = clear(velocity)
        return {**memory, "residual": remainder, "velocity": velocity}

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Momentum SGD's velocity: the optimizer has none."""
        step, velocity = self._step(mean, memory["velocity"])
        return step, {**memory, "velocity": velocity}

    def _step(self, gradient: tf.Tensor, velocity: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if self.nesterov:
            velocity = self.momentum * (velocity + gradient)
            return velocity + gradient, velocity
        velocity = self.momentum * velocity + gradient
        return velocity, velocity


class SharedMomentum(ErrorFeedback):
    """Error feedback on Adam's first moment, which every rank advances by its own gradient.

        p = beta_1 * m + (1 - beta_1) * g + residual;  m = mean over ranks of what was sent

    Source: Tang et al. 2021, algorithm 1.
    """

    def __init__(self, beta_1: float) -> None:
        """Keep beta_1; see the class."""
        self.beta_1 = beta_1

    def slots(self, shape: Shape, *, dense: bool) -> dict[str, Slot]:
        """M, and the residual."""
        return {"momentum": Slot(shape, "shared"), **super().slots(shape, dense=dense)}

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """This rank's m."""
        return self._moment(gradient, memory), memory

    def finish(self, result: tf.Tensor, memory: Memory) -> Memory:
        """The result is m."""
        return {**memory, "momentum": result}

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """The mean during warm-up, when the optimizer is Adam; m after it."""
        momentum = self._moment(mean, memory)
        return tf.where(warming_up, mean, momentum), {**memory, "momentum": momentum}

    def _moment(self, gradient: tf.Tensor, memory: Memory) -> tf.Tensor:
        return self.beta_1 * memory["momentum"] + (1 - self.beta_1) * gradient
