"""Checks and clocks that delay no other operation of a graph, and fused elementwise functions."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import tensorflow as tf


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return a bool per tensor: whether all its elements are finite."""
    # The sum over all axes but the last is a vector operation, unlike a reduction to one number. A finite sum means
    # finite elements. The reverse does not hold for huge elements, which are then checked one by one.
    sums = [tf.reduce_sum(tf.reshape(tensor, (-1, *tensor.shape[-1:])), 0) for tensor in tensors]
    return tf.cond(
        tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in sums]),
        lambda: tf.ones(len(tensors), tf.bool),
        lambda: tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]),
    )


def check_finite(finite: tf.Tensor, names: Sequence[str], rank: int, step: tf.Tensor) -> tf.Tensor:
    """Return `finite` if it is true for all tensors.

    Args:
        finite: Bool `(tensors,)`.
        names: One name per tensor.
        rank: This process, for the message.
        step: Number of exchanges before this one, for the message.

    Raises:
        tf.errors.InvalidArgumentError: a tensor is not finite; the message names rank, step and tensors.
    """
    text = f"rank {rank}: these gradients are not finite, from optimizer step"

    def check(finite: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        wrong = tf.boolean_mask(names, tf.logical_not(finite))
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(finite), [text, step, wrong], 10)]):
            return tf.identity(finite)

    return _unordered(check, finite, step)


def now(tensors: Sequence[Any]) -> tf.Tensor:
    """Return the time, in seconds, at which all tensors (plain, nested or ragged) have been computed."""
    with tf.control_dependencies(tf.nest.flatten(tensors, expand_composites=True)):
        return _unordered(tf.timestamp)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled by XLA if it is called in a graph: one pass over memory, not one per operation.

    For elementwise functions in code that cannot be compiled as a whole.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)

    @wraps(function)
    def call(*args: Any) -> Any:
        # Outside a graph XLA would compile again for each new shape.
        return function(*args) if tf.executing_eagerly() else compiled(*args)

    return call


def _unordered(body: Callable[..., tf.Tensor], *args: tf.Tensor) -> tf.Tensor:
    """Call `body` as soon as its inputs have been computed.

    A graph runs operations with side effects one after the other, in the order of the code: the check of a bucket would
    wait until the last bucket has travelled. `PartitionedCall` is not known to have side effects, so it does not wait.
    """
    if tf.executing_eagerly():
        return body(*args)
    specs = [tf.TensorSpec(arg.shape, arg.dtype) for arg in args]
    function = tf.function(body, autograph=False).get_concrete_function(*specs)
    return tf.raw_ops.PartitionedCall(args=list(args), Tout=[function.outputs[0].dtype], f=function)[0]
