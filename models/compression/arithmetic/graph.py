"""Checks, clocks and records of times that delay no other operation of a graph, and fused elementwise functions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import tensorflow as tf

GRADIENTS_NOT_FINITE = "these gradients are not finite"
MEANS_NOT_FINITE = "these means of finite gradients are not finite"
"""Texts of the errors of an exchange."""


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a bool per tensor: whether all its elements are finite."""
    # For XLA the sum over all axes but the last is a vector operation, unlike a reduction to one number.
    sums = [tf.reduce_sum(tf.reshape(tensor, (-1, *tensor.shape[-1:])), 0) for tensor in tensors]
    return _settle(tensors, tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in sums]))


def _settle(tensors: Sequence[tf.Tensor], sums_are_finite: tf.Tensor) -> tf.Tensor:
    # A finite sum means finite elements. The reverse does not hold for huge elements, which are checked one by one.
    return tf.cond(
        sums_are_finite,
        lambda: tf.ones(len(tensors), tf.bool),
        lambda: tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]),
    )


def check_finite(finite: tf.Tensor, names: Sequence[str], text: str, step: tf.Tensor) -> tf.Tensor:
    """Return `finite` if it is true for all tensors.

    Args:
        finite: Bool `(tensors,)`.
        names: One name per tensor.
        text: Text of the message before the step and the names.
        step: Number of exchanges before this one, for the message.

    Raises:
        tf.errors.InvalidArgumentError: a tensor is not finite; the message has text, step and names.
    """

    def check(finite: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        wrong = tf.boolean_mask(names, tf.logical_not(finite))
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(finite), [text, step, wrong], 10)]):
            return tf.identity(finite)

    return _unordered(check, finite, step)


def means_finite(means: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a bool per tensor as `all_finite` does, for tensors that XLA does not compile and that may be empty."""
    # XLA takes long to compile many tensors together. Outside XLA, the sum to one number is the fastest way.
    sums = tf.stack([tf.reduce_sum(mean) for mean in means])
    return _settle(means, tf.reduce_all(tf.math.is_finite(sums)))


def checked_means(
    means: Sequence[tf.Tensor], finite: tf.Tensor, names: Sequence[str], codec: str, step: tf.Tensor
) -> list[tf.Tensor]:
    """Return the means once all of them are known to be finite, so that an update uses all of them or none.

    Args:
        means: One per tensor.
        finite: Bool `(tensors,)`: whether each mean is finite, on this rank (`means_finite`) or on all ranks.
        names: Their names.
        codec: Name of the codec that made them, for the message.
        step: Number of exchanges before this one, for the message.

    Raises:
        tf.errors.InvalidArgumentError: a mean is not finite; the message has codec, step and tensors.
    """
    text = f"codec {codec}: {MEANS_NOT_FINITE}, at optimizer step"
    with tf.control_dependencies([check_finite(finite, names, text, step)]):
        return [tf.identity(mean) for mean in means]


def now(tensors: Sequence[Any]) -> tf.Tensor:
    """Return the time, in seconds, at which all tensors (plain, nested or ragged) have been computed."""
    with tf.control_dependencies(tf.nest.flatten(tensors, expand_composites=True)):
        return _unordered(tf.timestamp)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled by XLA if it is called in a graph: one pass over memory, not one per operation.

    It is for elementwise functions in code that cannot be compiled as a whole.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)

    @wraps(function)
    def call(*args: Any) -> Any:
        # Outside a graph XLA would compile again for each new shape.
        return function(*args) if tf.executing_eagerly() else compiled(*args)

    return call


def _unordered(body: Callable[..., tf.Tensor], *args: tf.Tensor) -> tf.Tensor:
    """Call `body` as soon as its inputs have been computed.

    A graph runs operations with side effects one after the other, in the order of the code. The check of a bucket
    would wait until the last bucket was exchanged. TensorFlow does not know that `PartitionedCall` has side effects,
    so the call does not wait.
    """
    if tf.executing_eagerly():
        return body(*args)
    specs = [tf.TensorSpec(arg.shape, arg.dtype) for arg in args]
    function = tf.function(body, autograph=False).get_concrete_function(*specs)
    return tf.raw_ops.PartitionedCall(args=list(args), Tout=[function.outputs[0].dtype], f=function)[0]


@dataclass(frozen=True)
class StepPart:
    """One part of a step."""

    phase: str
    name: str
    tensors: tuple[str, ...]
    """Paths of the variables whose gradients the part processes; empty: all variables."""


class Marks:
    """Records the times of the parts of a step; without such an object the graph has no clocks.

    The times are meaningful on a CPU, where an operation has finished when its output exists.
    """

    def __init__(self) -> None:
        """Begin without parts: graphs add parts when they are traced."""
        self._times: dict[StepPart, tf.Variable] = {}

    def add(self, phase: str, name: str, start: tf.Tensor, end: tf.Tensor, tensors: Sequence[str] = ()) -> None:
        """Record a part in a graph, which may be a branch that some steps do not run.

        Args:
            phase: Kind of the part.
            name: Name of the part, unique in its phase.
            start: Seconds since 1970, float64.
            end: The same.
            tensors: Paths of the variables that the part processes.
        """
        mark = StepPart(phase, name, tuple(tensors))
        if mark not in self._times:
            with tf.init_scope(), tf.device("CPU:0"):
                self._times[mark] = tf.Variable([math.nan, math.nan], dtype=tf.float64, trainable=False)
        # No operation waits for this clock, so it may be read a little late.
        self._times[mark].assign(tf.stack([tf.minimum(start, end), end]))

    def clear(self) -> None:
        """Forget all times, outside a graph."""
        for variable in self._times.values():
            variable.assign([math.nan, math.nan])

    def read(self) -> list[tuple[StepPart, float, float]]:
        """Return start and end of each part that ran since `clear`, outside a graph."""
        taken = [(mark, *variable.numpy().tolist()) for mark, variable in self._times.items()]
        return [(mark, start, end) for mark, start, end in taken if math.isfinite(start) and math.isfinite(end)]
