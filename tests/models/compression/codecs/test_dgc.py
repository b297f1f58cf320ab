"""Deep Gradient Compression: momentum SGD's velocities, sparse."""

import numpy as np
import pytest
import tensorflow as tf

SHAPE = (40, 30)


def velocity_sum(gradients, momentum, *, nesterov):
    """What momentum SGD of rate 1 would have applied in all."""
    velocity = total = np.zeros_like(gradients[0], np.float64)
    for gradient in gradients:
        velocity = momentum * velocity + gradient
        total = total + (momentum * velocity + gradient if nesterov else velocity)
    return total


@pytest.mark.parametrize(("size", "nesterov"), [(1, True), (3, True), (2, False)])
def test_without_masking_velocities_are_conserved(size, nesterov, make_ring, random_gradients):
    ring = make_ring(size, "dgc", {"density": 0.05, "masking": False, "nesterov": nesterov})
    steps = [random_gradients(size, (SHAPE,), seed=step) for step in range(6)]
    sent = sum(ring.exchange(step)[0].astype(np.float64) for step in steps)
    expected = velocity_sum([np.mean([rank[0] for rank in step], axis=0) for step in steps], 0.9, nesterov=nesterov)
    np.testing.assert_allclose(sent + ring.left_out(0, SHAPE), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(ring.left_out(0, SHAPE)).max() > 0.1


def test_masking_stops_momentum_where_something_was_sent(make_ring, random_gradients):
    ring, gradients = make_ring(1, "dgc", {"density": 0.1, "nesterov": False}), random_gradients(1, (SHAPE,))
    ring.exchange(gradients)
    (residual,), (velocity,) = ring.state("residual/gradient_0"), ring.state("velocity/gradient_0")
    sent = residual == 0
    assert np.count_nonzero(sent) == round(0.1 * 1200)  # one part
    np.testing.assert_array_equal(velocity, np.where(sent, 0, gradients[0][0]))


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_tensors_and_warm_up_get_plain_momentum(nesterov, make_ring, random_gradients, make_codec):
    ring = make_ring(2, make_codec("dgc", nesterov=nesterov), warmup_steps=3)
    steps = [random_gradients(2, (SHAPE, (7,)), seed=step) for step in range(4)]
    results = [ring.exchange(step) for step in steps]
    for index, count in ((0, 3), (1, 4)):  # the vector stays dense after the warm-up
        means = [np.mean([rank[index] for rank in step], axis=0) for step in steps[:count]]
        total = sum(result[index] for result in results[:count])
        np.testing.assert_allclose(total, velocity_sum(means, 0.9, nesterov=nesterov), rtol=1e-4, atol=1e-5)


CLIPPED = {"clip_norm": 1.0, "momentum": 0.0, "nesterov": False, "density": 1.0}


def test_local_clipping_is_by_the_norm_over_all_tensors(make_ring):
    gradients = [np.full((4, 4), 3.0, np.float32), np.full(4, 6.0, np.float32)]
    # sqrt(16 * 9 + 4 * 36) = 12 * sqrt(2), clipped to 1 / sqrt(4).
    factor = 0.5 / (12 * np.sqrt(2))
    for result, gradient in zip(make_ring(4, "dgc", CLIPPED).alike(*gradients), gradients, strict=True):
        np.testing.assert_allclose(result, factor * gradient, rtol=1e-5)


def test_local_clipping_leaves_the_name_of_a_tensor_that_is_not_finite(make_ring):
    gradients = [np.ones((4, 4), np.float32), np.full(4, np.nan, np.float32), np.ones(3, np.float32)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient_1") as caught:
        make_ring(1, "dgc", CLIPPED).alike(*gradients)
    assert "gradient_0" not in str(caught.value)
