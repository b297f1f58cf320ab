"""Simulated ranks, one thread each, that meet at every collective."""

import numpy as np
import pytest
import tensorflow as tf

from conf.sections.codecs import ExchangeConfig
from models.compression.arithmetic.randomness import make_key
from models.compression.codecs.table import CODECS
from models.compression.exchange.exchange import GradientExchange
from tests.models.meeting import Meeting

# The defaults of the configuration, but one bucket of all tensors.
EXCHANGE = {**ExchangeConfig().arguments(), "bucket_mib": None, "seed": 0}


class LockstepRank:
    """One of several threads; every collective waits for all of them."""

    def __init__(self, rank, meeting):
        self.rank, self.size, self.calls, self._meet = rank, meeting.size, [], meeting.all_of

    def allreduce(self, tensors, name=None):
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.calls.append(("allreduce", [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        return [tf.add_n(list(column)) for column in zip(*self._meet(list(tensors)), strict=True)]

    def alltoall(self, tensor, splits=None, name=None):
        rows = int(tensor.shape[0])
        lengths = [rows // self.size] * self.size if splits is None else splits.numpy().tolist()
        assert sum(lengths) == rows
        self.calls.append(("alltoall", [(tensor.dtype, tuple(tensor.shape))]))
        return tf.concat([section[self.rank] for section in self._meet(tf.split(tensor, lengths))], 0)

    def allgather(self, tensor, name=None):
        self.calls.append(("allgather", [(tensor.dtype, tuple(tensor.shape))]))
        return tf.concat(self._meet(tensor), 0)


class EqualRanks:
    """Ranks that all bring the same, so that nothing needs a meeting and all can be traced."""

    def __init__(self, size):
        self.rank, self.size = 0, size

    def allreduce(self, tensors, name=None):
        return [tensor * tf.cast(self.size, tensor.dtype) for tensor in tensors]

    def alltoall(self, tensor, splits=None, name=None):
        assert self.size == 1
        return tensor

    def allgather(self, tensor, name=None):
        return tf.concat([tensor] * self.size, 0)


class Ring:
    """As many exchanges as ranks, that run together."""

    def __init__(self, size, codec, settings):
        self.size, self._meeting = size, Meeting(size)
        self.ranks = [LockstepRank(rank, self._meeting) for rank in range(size)]
        settings = {**EXCHANGE, "jit_compile": False, "dense_below": 0, **settings}
        self.exchanges = [GradientExchange(codec, rank, **settings) for rank in self.ranks]

    def exchange(self, gradients_by_rank, learning_rate=None):
        """What every rank has in the end."""

        def one(rank):
            gradients = [tf.constant(gradient) for gradient in gradients_by_rank[rank]]
            return [each.numpy() for each in self.exchanges[rank].exchange(gradients, learning_rate)]

        first, *others = self._meeting.on_ranks(one)
        np.testing.assert_equal(others, [first] * len(others))
        return first

    def alike(self, *gradients, **settings):
        """What comes of gradients that all ranks have."""
        return self.exchange([gradients] * self.size, **settings)

    def state(self, name):
        """One state variable by name on every rank."""
        return [
            next(entry.variable.numpy() for entry in exchange.state if entry.name == name)
            for exchange in self.exchanges
        ]

    def left_out(self, index, shape):
        """Mean over ranks of the residuals, and the owners', of one tensor."""
        total = np.mean(self.state(f"residual/gradient_{index}"), axis=0)
        if f"owner_residual/gradient_{index}" in [entry.name for entry in self.exchanges[0].state]:
            parts = np.stack(self.state(f"owner_residual/gradient_{index}"))
            total = total + self.exchanges[0].codec.join_parts(tf.constant(parts), shape).numpy()
        return total


def encoded(compressor, values, real=None):
    """Message, remainder and what the message decodes to, of one part with so many real elements."""
    parts = tf.constant(values, tf.float32)[None]
    real = tf.constant([real or parts.shape[-1]])
    message, remainder = compressor.encode(parts, real, tf.constant(0), make_key(0))
    return message, remainder.numpy()[0], compressor.decode(message, tuple(parts.shape[1:])).numpy()[0]


def codec_of(name, **settings):
    required = {"tau": 0.05} if name == "threshold" else {}
    defaults = ExchangeConfig(codec={"name": name, **required}).codec.arguments()
    # Half of a method: the recipe takes it from the optimizer's settings.
    return CODECS[name](**{**defaults, **({"beta_1": 0.9} if name == "onebit_adam" else {}), **settings})


@pytest.fixture(scope="session")
def make_codec():
    """`make_codec(name, **settings)`: what is not given is the configuration's default."""
    return codec_of


@pytest.fixture(scope="session")
def encode():
    """`encode(compressor, values, real=None)`: message, remainder and what is decoded."""
    return encoded


@pytest.fixture(scope="session")
def make_exchange():
    """`make_exchange(codec name or codec, ranks, **settings)`: likewise, in one bucket, for equal ranks."""

    def make(codec, ranks, **settings):
        return GradientExchange(
            codec_of(codec) if isinstance(codec, str) else codec, EqualRanks(ranks), **{**EXCHANGE, **settings}
        )

    return make


@pytest.fixture(scope="session")
def make_ring(make_codec):
    """`make_ring(size, codec name or codec, codec settings, **exchange settings)`."""

    def make(size, codec, parameters=None, **settings):
        return Ring(size, make_codec(codec, **(parameters or {})) if isinstance(codec, str) else codec, settings)

    return make


@pytest.fixture(scope="session")
def random_gradients():
    """`random_gradients(ranks, shapes, seed)`: by rank, normal with very different scales from tensor to tensor."""

    def make(ranks, shapes=((40, 30), (30,), (3, 3, 6, 10), (5, 4), ()), seed=0):
        generator = np.random.default_rng(seed)
        return [
            [(10.0 ** (i % 3 - 1) * generator.normal(size=shape)).astype(np.float32) for i, shape in enumerate(shapes)]
            for _ in range(ranks)
        ]

    return make
