"""The interface of a codec: which message replaces a gradient, and which state a rank keeps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import tensorflow as tf

from models.compression.arithmetic.randomness import fold_in, make_key

Shape = tuple[int, ...]
Memory = dict[str, tf.Tensor]
"""State of one tensor by name, and values that one phase passes to the next."""
Message: TypeAlias = tf.Tensor | tuple[tf.Tensor, ...] | tf.RaggedTensor
"""The input of a collective from a phase; see `Codec`."""
CollectiveName = Literal["allreduce", "alltoall", "allgather"]


@dataclass(frozen=True)
class StateSpec:
    """Describes a state variable that a codec keeps for one tensor.

    The scope decides what happens when the number of ranks changes. "worker" state differs between ranks, and only its
    mean over ranks matters. "owner" state belongs to the part of the tensor that a rank sums for all. "shared" state is
    equal on every rank.
    """

    shape: Shape
    scope: Literal["worker", "owner", "shared"]
    initial: Callable[[Shape, tf.Tensor], tf.Tensor] | None = None
    """Makes the first value from the shape and a key (two int32, equal on every rank); None starts with zeros."""


@dataclass(frozen=True)
class Context:
    """The facts about one exchange of one tensor that a codec may use."""

    shape: Shape
    """Shape of the gradient."""
    rank: int
    """Rank of this process, 0 to size - 1."""
    size: int
    """Number of ranks."""
    step: tf.Tensor
    """Number of exchanges before this one, int32."""
    seed: int
    """Seed of all random numbers."""
    tensor: int
    """Position of the gradient in the list."""
    residual_scale: tf.Tensor
    """Learning rate of the last step divided by that of this step, or 1: residuals have the unit of the gradient."""

    @property
    def key(self) -> tf.Tensor:
        """A key of two int32, different for every step and tensor, equal on every rank."""
        return make_key(self.seed, 1, self.step, self.tensor)

    @property
    def rank_key(self) -> tf.Tensor:
        """A key of two int32, different for every step, tensor and rank."""
        return fold_in(self.key, self.rank + 1)


class Codec:
    """The exchange of one tensor as a chain of phases, with a collective between each two.

    Unless a codec says otherwise, it accepts every tensor, keeps no state and does nothing after dense exchanges.

        value = gradient
        for number in range(len(collectives)):
            message, memory = phase(number, value, memory)
            value = collectives[number](message)
        mean, memory = phase(len(collectives), value, memory)

    A phase passes to a collective:

    - "allreduce": a tensor of any shape; every rank gets the sum. Codecs with these only are called linear.
    - "alltoall": a tuple of tensors of any types, `(size, ...)`, with row r for rank r. Rank r gets the rows r of all
      ranks, in rank order.
    - "allgather": a tuple of tensors of any types, `(1, ...)`; every rank gets all rows, in rank order.

    Rows whose length depends on the data are one `tf.RaggedTensor` of bytes. Phases are pure functions of tensors. A
    memory may contain further entries between two phases.
    """

    name: str
    collectives: tuple[CollectiveName, ...]
    """Names of the collectives between the phases; empty: every tensor is sent dense."""
    compiled: bool = True
    """Whether XLA may compile the phases: their shapes do not depend on the data."""
    checks_finite: bool = False
    """Whether phase 0 adds the bool "finite" to the memory: false if the corrected gradient has an infinity or NaN."""
    local_clip_norm: float | None = None
    """Global norm: each rank clips its gradients to this norm divided by the square root of the number of ranks."""

    def accepts(self, shape: Shape) -> bool:
        """Return whether the codec compresses a tensor of this shape, of rank 2 or more; if not, it is sent dense."""
        return True

    def state_specs(self, shape: Shape, size: int, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state of one tensor among `size` ranks; `dense` if it is never sent compressed."""
        return {}

    def phase(self, number: int, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """Compute one link of the chain; see the class."""
        raise NotImplementedError

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """Return the result for a mean that was sent dense: the tensor is small, or the exchange is `warming_up`."""
        return mean, memory

    def join_parts(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """Return the whole tensor from the "owner" state of all ranks."""
        raise NotImplementedError
