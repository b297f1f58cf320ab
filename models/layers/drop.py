"""Dropout and stochastic depth from the samples' seeds: the same on any number of ranks and after a resume."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from models.layers.backend import ON_TENSORFLOW, require_tensorflow

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf

_SEEDS: ContextVar[Any | None] = ContextVar("sample_seeds", default=None)
_WEYL = 0x9E3779B9


def sample_seeds(seeds: Any) -> AbstractContextManager[None]:
    """Give the seeds of a batch, int32 `(batch,)` or None, to the layers that are called inside.

    The seeds are no input of the network, so that the served model takes only images.
    """
    return within(_SEEDS, seeds)


@contextmanager
def within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Give a context variable a value for all calls inside."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@keras.saving.register_keras_serializable(package="groundswell")
class SeededDrop(keras.layers.Layer):  # type: ignore[misc]
    """Sets random features to 0 in training, by the seeds of `sample_seeds`, and scales the others by 1 / (1 - rate).

        keep = uniform(seed of the sample, number of the layer, feature) >= rate

    A saved model has Keras's own `Dropout` instead: see `plain_layers`.

    Args:
        rate: Part of the features that is set to 0, in [0, 1).
        number: Number of this layer in the network, so that layers draw independently.
        whole_samples: Whether a sample keeps or loses all features together, as for stochastic depth.

    Raises:
        ValueError: a rate out of range; when called in training, missing seeds.

    Source: Srivastava et al. 2014, section 10, for the scaling in training; Huang et al. 2016 for whole samples.
    """

    def __init__(self, rate: float, number: int, whole_samples: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"rate must be in [0, 1), got {rate}")
        self.rate, self.number, self.whole_samples = rate, number, whole_samples
        self.built = True

    def call(self, features: Any, training: bool | None = None) -> Any:
        """Return the features `(batch, ...)`; in training, some of them as 0."""
        if not training:
            return features
        require_tensorflow("dropout by the seeds of samples, and so stochastic depth,")
        seeds = _SEEDS.get()
        if seeds is None:
            raise ValueError(f"layer {self.name!r} needs seeds, one per sample, when training: got none")
        shape = features.shape[1:]
        count = 1 if self.whole_samples else int(np.prod(shape))
        keep = uniform(tf.convert_to_tensor(seeds), self.number, count) >= self.rate
        keep = tf.reshape(keep, (-1, *([1] * len(shape) if self.whole_samples else shape)))
        return tf.where(keep, features * tf.cast(1.0 / (1.0 - self.rate), features.dtype), tf.zeros_like(features))

    def compute_output_spec(self, features: Any, training: Any = None) -> Any:
        """Return the shape and dtype of the features, which do not change."""
        return keras.KerasTensor(features.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`."""
        return {
            **super().get_config(),
            "rate": self.rate,
            "number": self.number,
            "whole_samples": self.whole_samples,
        }

    def plain(self) -> keras.layers.Layer:
        """Return Keras's own layer of the same rate, which draws from its own state."""
        shape = (None, *([1] * (len(self.input.shape) - 1))) if self.whole_samples else None
        return keras.layers.Dropout(self.rate, noise_shape=shape, name=self.name)


def uniform(seeds: Any, number: int, count: int) -> Any:
    """Draw numbers from the seeds of samples, a pure function of the arguments.

    Args:
        seeds: One per sample, int32 `(batch,)`.
        number: Number of the stream, so that layers draw independently; a network's layers use 0, 1, 2, ...
        count: Numbers for each sample.

    Returns:
        Uniform float32 `(batch, count)` in [0, 1), multiples of 2**-24.

    Source: Wellons 2018 ("lowbias32") for the function that mixes.
    """
    words = mix(mix(tf.bitcast(seeds, tf.uint32)) + tf.constant(number * _WEYL % 2**32, tf.uint32))
    counter = tf.constant((np.arange(count, dtype=np.uint64) * _WEYL % 2**32).astype(np.uint32))
    bits = mix(words[:, tf.newaxis] + counter)
    small = tf.bitcast(tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32)), tf.int32)
    return tf.cast(small, tf.float32) * 2.0**-24


def mix(word: Any) -> Any:
    """Return mixed uint32 words, by the "lowbias32" finaliser.

    Each input bit flips each output bit with probability 1/2, to 0.1 %.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ tf.bitwise.right_shift(word, tf.constant(shift, tf.uint32))) * tf.constant(factor, tf.uint32)
    return word ^ tf.bitwise.right_shift(word, tf.constant(16, tf.uint32))
