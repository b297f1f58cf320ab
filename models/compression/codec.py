"""The interface of a codec: what travels in place of a gradient, and what stays behind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import tensorflow as tf

from models.compression.arithmetic.randomness import fold_in, make_key

Shape = tuple[int, ...]
Memory = dict[str, tf.Tensor]
# tf.Tensor, tuple[tf.Tensor, ...] or tf.RaggedTensor: see Codec. TensorFlow has no types to tell them apart.
Message: TypeAlias = Any
CollectiveName = Literal["allreduce", "alltoall", "allgather"]
Scope = Literal["worker", "owner", "shared"]


@dataclass(frozen=True)
class Slot:
    """A state variable that a codec keeps for one tensor.

    The scope is what becomes of it when the number of ranks changes: "worker" slots differ between ranks and only their
    mean over ranks counts; "owner" slots belong to the part of the tensor that a rank sums for all; "shared" ones are
    equal everywhere.
    """

    shape: Shape
    scope: Scope
    initial: Callable[[Shape, tf.Tensor], tf.Tensor] | None = None
    """From shape and key (two int32, equal on every rank); None starts with zeros."""


@dataclass(frozen=True)
class Context:
    """What a codec may know about one exchange of one tensor."""

    shape: Shape
    """Of the gradient."""
    rank: int
    size: int
    """Number of ranks."""
    step: tf.Tensor
    """int32, exchanges done before this one."""
    seed: int
    tensor: int
    """Place of the gradient in the list."""
    residual_scale: tf.Tensor
    """Learning rate of the step before over this one's, or 1: residuals are in units of the gradient."""

    @property
    def key(self) -> tf.Tensor:
        """Two int32, different for every step and tensor, equal on every rank."""
        return make_key(self.seed, 1, self.step, self.tensor)

    @property
    def rank_key(self) -> tf.Tensor:
        """A key that differs between ranks too."""
        return fold_in(self.key, self.rank + 1)


class Codec(Protocol):
    """An exchange of one tensor as a chain of phases with a collective between each two.

        value = gradient
        for number in range(len(collectives)):
            message, memory = phase(number, value, memory)
            value = collectives[number](message)
        mean, memory = phase(len(collectives), value, memory)

    What a phase hands to a collective:

    - "allreduce": a tensor of any shape; every rank gets the sum. Codecs with these only are called linear.
    - "alltoall": a tuple of tensors of any types, `(size, ...)`, row r for rank r; rank r gets the rows r of all, in
      rank order.
    - "allgather": a tuple of tensors of any types, `(1, ...)`; every rank gets all rows, in rank order.

    Rows whose length depends on the data are one `tf.RaggedTensor` of bytes. Phases are pure functions of tensors; a
    memory may hold further entries from one phase to the next.
    """

    name: str
    collectives: tuple[CollectiveName, ...]
    """Empty: every tensor travels dense."""
    compiled: bool
    """Whether the phases may be compiled with XLA: their shapes depend on no data."""
    checks_finite: bool
    """Whether phase 0 leaves in the memory, as "finite", a bool: no gradient and no sum with it is infinite or NaN."""
    local_clip_norm: float | None
    """Clip the gradients of each rank to a global norm of this over the square root of the number of ranks."""

    def accepts(self, shape: Shape) -> bool:
        """Whether the codec makes a tensor of this shape, of rank 2 or more, smaller; otherwise it travels dense."""
        ...

    def slots(self, shape: Shape, size: int, *, dense: bool) -> dict[str, Slot]:
        """The state of one tensor among `size` ranks; `dense` where it never travels compressed."""
        ...

    def phase(self, number: int, value: Message, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """One link of the chain; see the class."""
        ...

    def after_dense(self, mean: tf.Tensor, memory: Memory, *, warming_up: tf.Tensor) -> tuple[tf.Tensor, Memory]:
        """What becomes of a mean that travelled dense, because the tensor is small or during `warming_up` (bool)."""
        ...

    def join_parts(self, parts: tf.Tensor, shape: Shape) -> tf.Tensor:
        """The whole tensor from the "owner" slots of all ranks."""
        ...
