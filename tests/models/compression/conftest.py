"""Simulated ranks, one thread each, that meet at every collective."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from conf.exchange import ExchangeConfig
from models.compression.codecs.table import CODECS
from models.compression.exchange.exchange import GradientExchange
from tests.patience import patient

# The defaults of the configuration, but one bucket of all tensors.
EXCHANGE = {**ExchangeConfig().arguments(), "bucket_mib": None, "seed": 0}


class LockstepRank:
    """One of several threads; every collective waits for all of them."""

    def __init__(self, rank, barrier, slots):
        self.rank = rank
        self.size = len(slots)
        self.calls = []
        self._barrier = barrier
        self._slots = slots

    def _meet(self, value):
        self._slots[self.rank] = value
        self._barrier.wait(timeout=patient(60))
        values = list(self._slots)
        self._barrier.wait(timeout=patient(60))
        return values

    def allreduce(self, tensors, name=None):
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.calls.append(("allreduce", [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        return [tf.add_n(list(column)) for column in zip(*self._meet(list(tensors)), strict=True)]

    def alltoall(self, tensor, splits=None, name=None):
        rows = int(tensor.shape[0])
        if splits is None:
            assert rows % self.size == 0
        lengths = [rows // self.size] * self.size if splits is None else splits.numpy().tolist()
        assert sum(lengths) == rows
        self.calls.append(("alltoall", [(tensor.dtype, tuple(tensor.shape))]))
        sections = self._meet(tf.split(tensor, lengths))
        return tf.concat([section[self.rank] for section in sections], 0)

    def allgather(self, tensor, name=None):
        self.calls.append(("allgather", [(tensor.dtype, tuple(tensor.shape))]))
        return tf.concat(self._meet(tensor), 0)


class EqualRanks:
    """Ranks that all bring the same, so that nothing needs a meeting and all can be traced."""

    def __init__(self, size):
        self.rank = 0
        self.size = size

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
        barrier, slots = threading.Barrier(size), [None] * size
        self.ranks = [LockstepRank(rank, barrier, slots) for rank in range(size)]
        settings = {**EXCHANGE, "jit_compile": False, "dense_below": 0, **settings}
        self.exchanges = [GradientExchange(codec, rank, **settings) for rank in self.ranks]
        self.size = size
        self._barrier = barrier

    def exchange(self, gradients_by_rank, learning_rate=None):
        """Every rank's results."""

        def one(pair):
            exchange, gradients = pair
            try:
                return exchange.exchange([tf.constant(gradient) for gradient in gradients], learning_rate)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            pairs = zip(self.exchanges, gradients_by_rank, strict=True)
            futures = [pool.submit(one, pair) for pair in pairs]
        errors = [future.exception() for future in futures if future.exception()]
        # A rank that stops breaks the others' barrier: what stopped it is the error.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        results = [[tensor.numpy() for tensor in future.result()] for future in futures]
        for result in results[1:]:
            for own, first in zip(result, results[0], strict=True):
                np.testing.assert_array_equal(own, first)
        return results[0]

    def state(self, name):
        """One state variable by name on every rank."""
        return [
            next(entry.variable.numpy() for entry in exchange.state if entry.name == name)
            for exchange in self.exchanges
        ]

    def left_out(self, index, shape):
        """Mean over ranks of the residuals, and the owners', of one tensor."""
        total = np.mean(self.state(f"residual/gradient_{index}"), axis=0)
        names = [entry.name for entry in self.exchanges[0].state]
        if f"owner_residual/gradient_{index}" in names:
            parts = np.stack(self.state(f"owner_residual/gradient_{index}"))
            total = total + self.exchanges[0].codec.join_parts(tf.constant(parts), shape).numpy()
        return total


@pytest.fixture(scope="session")
def make_codec():
    """`make_codec(name, **settings)`: what is not given is the configuration's default."""

    def make(name, **settings):
        required = {"tau": 0.05} if name == "threshold" else {}
        defaults = ExchangeConfig(codec={"name": name, **required}).codec.arguments()
        # Half of a method: the recipe takes it from the optimizer's settings.
        shared = {"beta_1": 0.9} if name == "onebit_adam" else {}
        return CODECS[name](**{**defaults, **shared, **settings})

    return make


@pytest.fixture(scope="session")
def make_exchange(make_codec):
    """`make_exchange(codec name or codec, collective, **settings)`: likewise, but in one bucket."""

    def make(codec, collective, **settings):
        built = make_codec(codec) if isinstance(codec, str) else codec
        return GradientExchange(built, collective, **{**EXCHANGE, **settings})

    return make


@pytest.fixture(scope="session")
def make_ring(make_codec):
    """`make_ring(size, codec name or codec, codec settings, **exchange settings)`."""

    def make(size, codec, parameters=None, **settings):
        built = make_codec(codec, **(parameters or {})) if isinstance(codec, str) else codec
        return Ring(size, built, settings)

    return make


@pytest.fixture(scope="session")
def equal_ranks():
    return EqualRanks


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
