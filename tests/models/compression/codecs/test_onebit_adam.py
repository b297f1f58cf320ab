"""1-bit Adam: codec and optimizer together."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.sections.optimizers import OneBitAdamConfig
from models.optimizers.onebit_adam import OneBitAdam

SHAPES = ((40, 30), (7,))


def make_pair(learning_rate, **settings):
    """The optimizer with the configuration's defaults, but without weight decay."""
    return OneBitAdam(learning_rate, **{**OneBitAdamConfig(weight_decay=0.0).arguments(), **settings})


def train(optimizer, gradients):
    """Weights after each step from 1."""
    variables = [keras.Variable(np.ones(shape, np.float32)) for shape in SHAPES]
    optimizer.build(variables)
    history = []
    for step in gradients:
        optimizer.apply([tf.constant(each) for each in step], variables)
        history.append([np.array(variable) for variable in variables])
    return history


def test_warm_up_is_adam_and_the_second_moment_freezes(make_ring, random_gradients, make_codec):
    ring = make_ring(2, make_codec("onebit_adam"), warmup_steps=3)
    steps = [random_gradients(2, SHAPES, seed=step) for step in range(6)]
    means = [[np.mean([rank[index] for rank in step], axis=0) for index in range(2)] for step in steps]
    received = [ring.exchange(step) for step in steps]
    pair, adam = make_pair(0.01, warmup_steps=3), keras.optimizers.Adam(0.01)
    ours, theirs = train(pair, received), train(adam, means)
    for own, other in itertools.chain(*map(zip, ours[:3], theirs[:3])):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-7)
    # The frozen second moment, from the first three gradients.
    for index in range(2):
        second = np.zeros(SHAPES[index])
        for step in range(3):
            second = 0.999 * second + 0.001 * means[step][index] ** 2
        np.testing.assert_allclose(pair._second[index], second, rtol=1e-4)
    assert not np.allclose(ours[5][0], theirs[5][0], rtol=1e-4)


def test_moments_of_dense_tensors_stay_exact(make_ring, random_gradients, make_codec):
    ring, moment = make_ring(3, make_codec("onebit_adam", beta_1=0.8), warmup_steps=2), np.zeros(SHAPES[1])
    for step in range(5):
        gradients = random_gradients(3, SHAPES, seed=step)
        mean = np.mean([rank[1] for rank in gradients], axis=0)
        moment = 0.8 * moment + 0.2 * mean
        np.testing.assert_allclose(ring.exchange(gradients)[1], mean if step < 2 else moment, rtol=1e-5, atol=1e-7)


def test_first_moments_and_residuals_are_conserved(make_ring, random_gradients, make_codec):
    # m_t = m-hat_t + what was left out; the exact moment advances from the sent one by each mean gradient.
    ring = make_ring(2, make_codec("onebit_adam"), warmup_steps=1)
    ring.exchange(random_gradients(2, SHAPES))
    sent, left = ring.state("momentum/gradient_0")[0], ring.left_out(0, SHAPES[0])
    np.testing.assert_array_equal(left, 0)
    for step in range(4):
        gradients = random_gradients(2, SHAPES, seed=step + 1)
        exact = 0.9 * sent + 0.1 * np.mean([rank[0] for rank in gradients], axis=0) + left
        (result, _), left = ring.exchange(gradients), ring.left_out(0, SHAPES[0])
        sent = ring.state("momentum/gradient_0")[0]
        np.testing.assert_array_equal(result, sent)
        np.testing.assert_allclose(sent + left, exact, rtol=1e-5, atol=1e-6)
        assert len(np.unique(np.abs(result))) == 2  # one scale a part


def test_the_scale_keeps_the_mean_magnitude_or_the_norm(make_codec):
    values = np.random.default_rng(0).normal(size=(1, 64)).astype(np.float32)
    size, one, two = values.size, np.abs(values).sum(), np.linalg.norm(values)
    scales, errors = {"mean": one / size, "norm": two / np.sqrt(size)}, {}
    for scale, expected in scales.items():
        quantiser = make_codec("onebit_adam", scale=scale).compressor
        message, remainder = quantiser.encode(tf.constant(values), tf.constant([size]), None, None)
        decoded = quantiser.decode(message, (size,)).numpy()
        np.testing.assert_allclose(decoded, np.sign(values) * expected, rtol=1e-5)
        np.testing.assert_allclose(decoded + remainder, values, rtol=1e-5, atol=1e-6)
        errors[scale] = np.sum(np.square(remainder))
    assert (errors["mean"], errors["norm"]) == (
        pytest.approx(two**2 - one**2 / size, rel=1e-4),
        pytest.approx(2 * two**2 - 2 * two * one / np.sqrt(size), rel=1e-4),
    )


def test_elements_without_second_moment_stay():
    variable, optimizer = keras.Variable(np.ones(2, np.float32)), make_pair(0.1, warmup_steps=1)
    optimizer.build([variable])
    weights = []
    for gradient in ([1.0, 0.0], [1.0, 1.0]):
        optimizer.apply([tf.constant(gradient)], [variable])
        weights.append(np.array(variable).tolist())
    assert weights[1][0] < weights[0][0]
    assert weights[1][1] == weights[0][1] == 1
