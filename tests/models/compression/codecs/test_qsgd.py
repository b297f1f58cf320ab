"""QSGD and its one-level sparsifier: right on average, with the stated variance."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.randomness import make_key
from models.compression.codecs.norm_sparsifier import NormSparsifier
from models.compression.codecs.qsgd import StochasticQuantiser

DRAWS, VALUES = 2000, np.random.default_rng(0).normal(size=256).astype(np.float32)


def draw(quantiser, values, draws=DRAWS):
    """`(draws, elements)` of what one vector decodes to; every row has random numbers of its own."""
    parts = tf.repeat(tf.constant(values, tf.float32)[None], draws, 0)
    message, remainder = quantiser.encode(parts, None, None, make_key(0))
    restored = quantiser.decode(message, tuple(parts.shape[1:]))
    np.testing.assert_allclose(restored + remainder, parts, rtol=1e-5, atol=1e-5)
    return restored.numpy().astype(np.float64)


def check_unbiased(draws, values, unit):
    """`unit` is what one rounding up adds: draws of a rare one are not normal."""
    error, deviation = draws.mean(axis=0) - values, draws.std(axis=0) / np.sqrt(len(draws))
    # 5 standard errors: one false alarm in 25,000 runs of 64 elements; or 5 rare events.
    assert np.all(np.abs(error) <= 5 * deviation + 5 * unit / len(draws))


@pytest.mark.parametrize(("bits", "norm"), [(2, "l2"), (3, "l2"), (4, "max")])
def test_levels_are_unbiased(bits, norm):
    values, levels = VALUES[:64], 2 ** (bits - 1) - 1
    draws = draw(StochasticQuantiser(bits, 32, norm), values)
    check_unbiased(draws, values, np.abs(values).max() / levels)
    sizes = np.linalg.norm(values.reshape(2, 32), 2 if norm == "l2" else np.inf, axis=1, keepdims=True)
    found = draws.reshape(-1, 2, 32) / sizes * levels
    np.testing.assert_allclose(found, np.round(found), atol=1e-4)
    assert np.abs(found).max() <= levels + 1e-4


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_variance_is_within_the_theorem(bits):
    values, levels = VALUES[:64], 2 ** (bits - 1) - 1
    draws = draw(StochasticQuantiser(bits, 64, "l2"), values, 400)
    measured = np.mean(np.sum((draws - values) ** 2, axis=1)) / np.sum(values**2)
    assert 0 < measured <= min(64 / levels**2, np.sqrt(64) / levels)
    # And exactly the sum of p (1 - p) of the roundings.
    scaled = np.abs(values) / np.linalg.norm(values) * levels
    chance = scaled - np.floor(scaled)
    assert measured == pytest.approx(np.sum(chance * (1 - chance)) / levels**2, rel=0.15)


def test_sparsifier_is_unbiased_with_the_stated_variance_and_count():
    values, draws = VALUES, draw(NormSparsifier(), VALUES)
    one, two = np.abs(values).sum(), np.linalg.norm(values)
    check_unbiased(draws, values, two)
    # E|Q - v|^2 = (|v|_1 / |v|_2 - 1) |v|^2; the deviation of the mean over draws is about 1 % here.
    errors = np.sum((draws - values) ** 2, axis=1) / two**2
    assert errors.mean() == pytest.approx(one / two - 1, abs=5 * errors.std() / np.sqrt(DRAWS))
    counts = np.count_nonzero(draws, axis=1)
    assert counts.mean() == pytest.approx(one / two, abs=5 * counts.std() / np.sqrt(DRAWS))
    np.testing.assert_allclose(np.unique(np.abs(draws)), [0, two], rtol=1e-5)


def test_sparsifier_sends_four_bytes_a_survivor(encode):
    message, remainder, _ = encode(NormSparsifier(), VALUES)
    assert message.row_lengths().numpy().tolist() == [4 + 4 * np.count_nonzero(remainder != VALUES)]


@pytest.mark.long
def test_ranks_round_independently(make_ring):
    # 8 ranks with one gradient: with shared random numbers the mean's variance would be that of one rank.
    gradient = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    flat, errors = tf.constant(gradient.reshape(1, -1)), {}
    for size in (1, 8):
        ring = make_ring(size, "qsgd", {"bits": 3})
        quantiser = ring.exchanges[0].codec.compressor
        parts = [quantiser.encode(flat, None, None, make_key(0, rank))[1].numpy() for rank in range(size)]
        errors[size] = np.mean(np.mean(parts, axis=0) ** 2)
        results = [ring.alike(gradient)[0] for _ in range(10)]
        assert np.mean((np.mean(results, axis=0) - gradient) ** 2) < np.mean((results[0] - gradient) ** 2) / 5
    assert errors[8] == pytest.approx(errors[1] / 8, rel=0.3)


def test_zero_bucket_and_single_spike():
    values = np.zeros(64, np.float32)
    values[40] = -3
    np.testing.assert_allclose(draw(StochasticQuantiser(4, 32, "l2"), values, 2), [values, values], rtol=1e-6)
