"""Exchanges between simulated ranks, one thread each."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from models.compression.exchange import GradientExchange
from models.compression.table import CODECS


class LockstepRank:
    """One of several threads that meet at every allreduce and sum what all of them brought."""

    def __init__(self, rank, barrier, slots):
        self.rank = rank
        self.size = len(slots)
        self.calls = []
        self._barrier = barrier
        self._slots = slots

    def allreduce(self, tensors):
        assert len({tensor.dtype for tensor in tensors}) == 1
        self.calls.append([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
        self._slots[self.rank] = tensors
        self._barrier.wait(timeout=30)
        sums = [tf.add_n(list(column)) for column in zip(*self._slots, strict=True)]
        self._barrier.wait(timeout=30)
        return sums


class EqualRanks:
    """Ranks that all bring the same, so that the sum needs no meeting and can be traced."""

    def __init__(self, size):
        self.rank = 0
        self.size = size

    def allreduce(self, tensors):
        return [tensor * tf.cast(self.size, tensor.dtype) for tensor in tensors]


def exchange_all(gradients_by_rank, codec, **settings):
    size = len(gradients_by_rank)
    barrier, slots = threading.Barrier(size), [None] * size
    ranks = [LockstepRank(rank, barrier, slots) for rank in range(size)]

    def one(rank):
        exchange = GradientExchange(CODECS[codec](), rank, **settings)
        return exchange.exchange([tf.constant(gradient) for gradient in gradients_by_rank[rank.rank]])

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, ranks)), [rank.calls for rank in ranks]


def random_gradients(ranks, shapes=((40, 30), (30,), (3, 3, 16, 16), (5, 4), ())):
    generator = np.random.default_rng(0)
    return [[generator.normal(size=shape).astype(np.float32) for shape in shapes] for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-6), ("fp16", 3e-3)])
def test_every_rank_gets_the_mean(ranks, codec, tolerance):
    gradients = random_gradients(ranks)
    results, _ = exchange_all(gradients, codec)
    means = [np.mean(column, axis=0) for column in zip(*gradients, strict=True)]
    for result in results:
        for ours, mean, first in zip(result, means, results[0], strict=True):
            assert ours.dtype == tf.float32
            np.testing.assert_allclose(ours, mean, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(ours, first)


def test_small_tensors_and_vectors_keep_all_digits_under_compression():
    gradients = random_gradients(2, shapes=((2000,), (31, 33), (32, 32), ()))  # 31 * 33 = 1023, 32 * 32 = 1024
    results, calls = exchange_all(gradients, "fp16")
    # One grouped operation a dtype, in the order of the gradients.
    expected = [[(tf.float32, (2000,)), (tf.float32, (31, 33)), (tf.float32, ())], [(tf.float16, (32, 32))]]
    assert calls == [expected, expected]
    for index in (0, 1, 3):
        np.testing.assert_allclose(results[0][index], np.mean([each[index] for each in gradients], axis=0), rtol=1e-6)
    assert not np.allclose(results[0][2], np.mean([each[2] for each in gradients], axis=0), rtol=1e-6, atol=0)


def test_one_dtype_travels_in_one_operation():
    _, calls = exchange_all(random_gradients(2), "none")
    assert [len(rank_calls) for rank_calls in calls] == [1, 1]


def test_dense_below_moves_the_border():
    _, calls = exchange_all(random_gradients(2, shapes=((5, 4), (30,))), "fp16", dense_below=0)
    assert calls[0] == [[(tf.float16, (5, 4))], [(tf.float32, (30,))]]


def test_large_values_do_not_overflow_in_the_sum_of_halves():
    gradients = [[np.full((32, 32), 40000.0, np.float32)] for _ in range(4)]  # their sum, 160000, is beyond 65504
    results, calls = exchange_all(gradients, "fp16")
    assert calls[0][0][0][0] == tf.float16
    np.testing.assert_array_equal(results[0][0], 40000.0)


def test_payload_bytes_by_hand():
    gradients = [tf.zeros((40, 30)), tf.zeros((30,)), tf.zeros((3, 3, 16, 16)), tf.zeros((5, 4)), tf.zeros(())]
    matrices, rest = 40 * 30 + 3 * 3 * 16 * 16, 30 + 5 * 4 + 1
    assert GradientExchange(CODECS["none"](), EqualRanks(8)).payload_bytes(gradients) == 4 * (matrices + rest)
    assert GradientExchange(CODECS["fp16"](), EqualRanks(8)).payload_bytes(gradients) == 2 * matrices + 4 * rest


def test_payload_bytes_need_shapes_only():
    specs = [tf.TensorSpec((1 << 20, 1 << 20), tf.float32)]  # 4 TiB
    assert GradientExchange(CODECS["fp16"](), EqualRanks(2)).payload_bytes(specs) == 2 << 40


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_traces_into_a_function(codec):
    exchange = GradientExchange(CODECS[codec](), EqualRanks(4))
    gradients = [tf.random.stateless_normal((32, 40), (1, 2)), tf.random.stateless_normal((7,), (3, 4))]
    results = tf.function(exchange.exchange)(gradients)
    for result, gradient in zip(results, gradients, strict=True):
        np.testing.assert_allclose(result, gradient, rtol=2e-3, atol=1e-6)


def test_half_gradients_come_back_as_halves():
    exchange = GradientExchange(CODECS["none"](), EqualRanks(4))
    (result,) = exchange.exchange([tf.ones((2, 2), tf.float16)])
    assert result.dtype == tf.float16


def test_missing_gradients_are_named():
    exchange = GradientExchange(CODECS["none"](), EqualRanks(2))
    with pytest.raises(ValueError, match=r"gradients \[1, 3\] are None"):
        exchange.exchange([tf.ones(()), None, tf.ones(()), None])
    with pytest.raises(ValueError, match=r"gradients \[0\] are None"):
        exchange.payload_bytes([None])


def test_codecs_that_cannot_be_summed_are_rejected():
    class Signs:
        name = "signs"
        linear = False

    with pytest.raises(ValueError, match="must be linear, whose payloads can be summed; got 'signs'"):
        GradientExchange(Signs(), EqualRanks(2))
