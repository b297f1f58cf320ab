"""Worker memories: the parts of its own gradients that a rank keeps and adds to later gradients."""

from collections.abc import Callable

import tensorflow as tf

from models.compression.codec import Memory, Shape, StateSpec

Clear = Callable[[tf.Tensor], tf.Tensor]


class WorkerMemory:
    """Corrects a gradient before it is encoded, and stores the residual; these methods do neither."""

    def state_specs(self, shape: Shape, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state of one tensor; `dense` if it is never sent compressed."""
        return {}

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """Return the tensor to encode for the gradient; the caller adds the state "residual" if there is one."""
        return gradient, memory

    def store(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """Store the remainder: the encoded tensor minus the decoded message.

        Args:
            remainder: A tensor with the shape of the gradient.
            clear: Returns a tensor of that shape with zeros where elements were sent exactly.
            memory: The memory that `advance` has returned.
        """
        return memory

    def finish(self, result: tf.Tensor, memory: Memory) -> Memory:
        """Return the memory after the exchange, whose result is equal on every rank."""
        return memory

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Return the result for a mean that was sent dense; see `Codec.after_dense`."""
        return mean, memory


class NoMemory(WorkerMemory):
    """No state: everything that a message leaves out is lost. It is for unbiased codecs, and a baseline."""


class ErrorFeedback(WorkerMemory):
    """Adds the residual, which was not sent, to the next gradient.

        p = g + residual;  send Q(p);  residual = p - Q(p)

    Over any number of steps, all sent messages and the last residual sum to all gradients.

    Source: Seide et al. 2014, section 3.1; Karimireddy et al. 2019. The residual's change of unit with the learning
    rate: Zheng et al. 2019.
    """

    def state_specs(self, shape: Shape, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state: the residual."""
        return {} if dense else {"residual": StateSpec(shape, "worker")}

    def store(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """Store the remainder as the residual."""
        return {**memory, "residual": remainder}


class MomentumCorrection(ErrorFeedback):
    """Error feedback on velocities instead of gradients.

        u = momentum * u + g;  v = v + u            (Nesterov: u = momentum * (u + g);  v = v + u + g)
        send Q(v);  v = v - Q(v);  where something was sent: u = 0    (masking)

    Without masking, all sent messages and v sum to the updates of momentum SGD. With masking, the momentum of an
    element stops when the element is sent. At high densities this erases most of the momentum: at density 1 only the
    gradient remains.

    Source: Lin et al. 2018, sections 3.1 and 3.2; the Nesterov form is that of the authors' code.
    """

    def __init__(self, momentum: float, *, nesterov: bool, masking: bool) -> None:
        """Store the settings."""
        self.momentum, self.nesterov, self.masking = momentum, nesterov, masking

    def state_specs(self, shape: Shape, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state: u, and v as the residual."""
        return {"velocity": StateSpec(shape, "worker"), **super().state_specs(shape, dense=dense)}

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """Return the tensor that this gradient adds to v."""
        if self.nesterov:
            velocity = self.momentum * (memory["velocity"] + gradient)
            return velocity + gradient, {**memory, "velocity": velocity}
        velocity = self.momentum * memory["velocity"] + gradient
        return velocity, {**memory, "velocity": velocity}

    def store(self, remainder: tf.Tensor, clear: Clear, memory: Memory) -> Memory:
        """Store v without the sent amounts, and u without the sent elements."""
        velocity = clear(memory["velocity"]) if self.masking else memory["velocity"]
        return {**memory, "residual": remainder, "velocity": velocity}

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Return the velocity of momentum SGD, because the optimizer has no momentum."""
        return self.advance(mean, memory)


class SharedMomentum(ErrorFeedback):
    """Error feedback on Adam's first moment, which every rank advances by its own gradient.

        p = beta_1 * m + (1 - beta_1) * g + residual;  m = mean over ranks of what was sent

    Source: Tang et al. 2021, algorithm 1.
    """

    def __init__(self, beta_1: float) -> None:
        """Store the decay."""
        self.beta_1 = beta_1

    def state_specs(self, shape: Shape, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state: m and the residual."""
        return {"momentum": StateSpec(shape, "shared"), **super().state_specs(shape, dense=dense)}

    def advance(self, gradient: tf.Tensor, memory: Memory) -> tuple[tf.Tensor, Memory]:
        """Return m advanced by this rank's gradient."""
        return self._moment(gradient, memory), memory

    def finish(self, result: tf.Tensor, memory: Memory) -> Memory:
        """Store the result as m."""
        return {**memory, "momentum": result}

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Return the mean while warming up, when the optimizer is plain Adam, and m afterwards."""
        momentum = self._moment(mean, memory)
        return tf.where(warming_up, mean, momentum), {**memory, "momentum": momentum}

    def _moment(self, gradient: tf.Tensor, memory: Memory) -> tf.Tensor:
        return self.beta_1 * memory["momentum"] + (1 - self.beta_1) * gradient
