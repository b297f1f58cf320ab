"""Checks and clocks in a graph that hold nothing else up, and operations that are joined."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import tensorflow as tf

from models.compression.codec import Message


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Bool, one a tensor: whether all of its elements are."""
    # The sum over all axes but the last is a vector operation, unlike a reduction to one number. It is finite only
    # where all its elements are; the reverse need not hold, for huge ones.
    sums = [tf.reduce_sum(tf.reshape(tensor, (-1, *tensor.shape[-1:])), 0) for tensor in tensors]
    return tf.cond(
        tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in sums]),
        lambda: tf.ones(len(tensors), tf.bool),
        lambda: tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]),
    )


def check_finite(finite: tf.Tensor, names: Sequence[str], rank: int, step: tf.Tensor) -> tf.Tensor:
    """`finite` again, which only comes where it is true for all.

    Raises:
        tf.errors.InvalidArgumentError: Names rank, step and tensors.
    """
    text = f"rank {rank}: these gradients are not finite, from optimizer step"

    def check(finite: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        wrong = tf.boolean_mask(names, tf.logical_not(finite))
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(finite), [text, step, wrong], 10)]):
            return tf.identity(finite)

    return _unordered(check, finite, step)


def now(tensors: Sequence[Message]) -> tf.Tensor:
    """The time at which tensors are there."""
    with tf.control_dependencies(tf.nest.flatten(tensors, expand_composites=True)):
        return _unordered(tf.timestamp)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as XLA compiles it where it is part of a graph: one pass over memory instead of one an operation.

    For what is the same for each element in code that as a whole cannot be compiled.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)

    @wraps(function)
    def call(*args: Any) -> Any:
        # Eagerly each new shape would be compiled first.
        return function(*args) if tf.executing_eagerly() else compiled(*args)

    return call


def _unordered(body: Callable[..., tf.Tensor], *args: tf.Tensor) -> tf.Tensor:
    """Call `body` as soon as its inputs are there.

    A graph runs operations with effects one after the other, in the order of the code: the check of a bucket would wait
    until the bucket before has travelled. A call that does not say that it has effects is left out of that.
    """
    if tf.executing_eagerly():
        return body(*args)
    specs = [tf.TensorSpec(arg.shape, arg.dtype) for arg in args]
    function = tf.function(body, autograph=False).get_concrete_function(*specs)
    return tf.raw_ops.PartitionedCall(args=list(args), Tout=[function.outputs[0].dtype], f=function)[0]
