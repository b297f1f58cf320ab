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


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_without_masking_velocities_are_conserved(size, nesterov, make_ring, random_gradients, make_codec):
    ring = make_ring(size, make_codec("dgc", density=0.05, masking=False, nesterov=nesterov))
    steps = [random_gradients(size, (SHAPE,), seed=step) for step in range(6)]
    sent = sum(ring.exchange(step)[0].astype(np.float64) for step in steps)
    means = [np.mean([rank[0] for rank in step], axis=0) for step in steps]
    expected = velocity_sum(means, 0.9, nesterov=nesterov)
    np.testing.assert_allclose(sent + ring.left_out(0, SHAPE), expected, rtol=1e-4, atol=1e-4)
    assert np.abs(ring.left_out(0, SHAPE)).max() > 0.1


def test_masking_stops_momentum_where_something_was_sent(make_ring, random_gradients, make_codec):
    ring = make_ring(1, make_codec("dgc", density=0.1, nesterov=False))
    gradients = random_gradients(1, (SHAPE,))
    ring.exchange(gradients)
    (residual,), (velocity,) = ring.state("residual/gradient_0"), ring.state("velocity/gradient_0")
    sent = residual == 0
    assert np.count_nonzero(sent) == round(0.1 * 1200)  # one part
    assert not velocity[sent].any()
    np.testing.assert_array_equal(velocity[~sent], gradients[0][0][~sent])


def test_masking_at_full_density_leaves_plain_gradients(make_ring, random_gradients, make_codec):
    ring = make_ring(2, make_codec("dgc", density=1.0, nesterov=False))
    for step in range(3):
        gradients = random_gradients(2, (SHAPE,), seed=step)
        mean = (gradients[0][0] + gradients[1][0]) / 2
        np.testing.assert_allclose(ring.exchange(gradients)[0], mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dense_tensors_and_warm_up_get_plain_momentum(nesterov, make_ring, random_gradients, make_codec):
    ring = make_ring(2, make_codec("dgc", nesterov=nesterov), warmup_steps=3)
    steps = [random_gradients(2, (SHAPE, (7,)), seed=step) for step in range(4)]
    results = [ring.exchange(step) for step in steps]
    for index, count in ((0, 3), (1, 4)):  # the vector stays dense after the warm-up
        means = [np.mean([rank[index] for rank in step], axis=0) for step in steps[:count]]
        total = sum(result[index] for result in results[:count])
        np.testing.assert_allclose(total, velocity_sum(means, 0.9, nesterov=nesterov), rtol=1e-4, atol=1e-5)


def test_local_clipping_is_by_the_norm_over_all_tensors(make_ring, make_codec):
    ring = make_ring(4, make_codec("dgc", clip_norm=1.0, momentum=0.0, nesterov=False, density=1.0))
    gradients = [[np.full((4, 4), 3.0, np.float32), np.full(4, 6.0, np.float32)]] * 4
    # sqrt(16 * 9 + 4 * 36) = 12 * sqrt(2), clipped to 1 / sqrt(4).
    factor = 0.5 / (12 * np.sqrt(2))
    for result, gradient in zip(ring.exchange(gradients), gradients[0], strict=True):
        np.testing.assert_allclose(result, factor * gradient, rtol=1e-5)


def test_local_clipping_leaves_the_name_of_a_tensor_that_is_not_finite(make_ring, make_codec):
    ring = make_ring(1, make_codec("dgc", clip_norm=1.0, momentum=0.0, nesterov=False, density=1.0))
    gradients = [np.ones((4, 4), np.float32), np.full(4, np.nan, np.float32), np.ones(3, np.float32)]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        ring.exchange([gradients])
    assert "gradient_1" in str(caught.value)
    assert "gradient_0" not in str(caught.value)


@pytest.mark.parametrize("setting", [{"momentum": 1.0}, {"clip_norm": 0.0}, {"density": 0.0}])
def test_out_of_range(setting, make_codec):
    with pytest.raises(ValueError, match=f"{next(iter(setting))} must be"):
        make_codec("dgc", **setting)
