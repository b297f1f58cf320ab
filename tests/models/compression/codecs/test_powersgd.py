"""PowerSGD: N workers are one, factors orthonormal, exact where the rank suffices."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.codecs.powersgd import orthonormal

SHAPE = (3, 3, 8, 40)  # a matrix of 72 x 40


def low_rank(rank, seed=0):
    generator = np.random.default_rng(seed)
    return (generator.normal(size=(72, rank)) @ generator.normal(size=(rank, 40))).reshape(SHAPE).astype(np.float32)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_would_on_the_mean(size, make_ring, random_gradients, make_codec):
    many, one = make_ring(size, make_codec("powersgd", rank=2)), make_ring(1, make_codec("powersgd", rank=2))
    for step in range(4):
        gradients = random_gradients(size, (SHAPE,), seed=step)
        mean = np.mean([each[0] for each in gradients], axis=0)
        (together,), (alone,) = many.exchange(gradients), one.exchange([[mean]])
        np.testing.assert_allclose(together, alone, rtol=1e-3, atol=1e-5 * np.abs(alone).max() * 10)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_exact_where_the_rank_suffices(rank, make_ring, make_codec):
    ring = make_ring(2, make_codec("powersgd", rank=4, min_compression=1))
    (result,) = ring.exchange([[low_rank(rank, seed=0)], [3 * low_rank(rank, seed=0)]])
    np.testing.assert_allclose(result, 2 * low_rank(rank, seed=0), rtol=1e-3, atol=1e-4)


def test_warm_start_comes_closer_with_every_step(make_ring, make_codec):
    generator = np.random.default_rng(0)
    left, _ = np.linalg.qr(generator.normal(size=(72, 40)))
    right, _ = np.linalg.qr(generator.normal(size=(40, 40)))
    matrix = ((left * 0.7 ** np.arange(40)) @ right.T).astype(np.float32)
    best = np.sqrt(np.sum(0.7 ** (2 * np.arange(2, 40))))  # the error of the best matrix of rank 2
    errors = {}
    for warm_start in (True, False):
        ring = make_ring(1, make_codec("powersgd", rank=2, warm_start=warm_start, error_feedback=False))
        errors[warm_start] = np.linalg.norm([ring.alike(matrix)[0] for _ in range(15)][-1] - matrix)
    assert errors[True] == pytest.approx(best, rel=0.01)
    assert errors[False] > 1.02 * best


def test_residuals_of_ranks_with_different_data_stay_bounded(make_ring, make_codec):
    # The residual is each rank's own: that of the common projection would grow with every step.
    offset, *noises = np.random.default_rng(0).normal(size=(61, 2, 72, 40)).astype(np.float32)
    ring, norms = make_ring(2, make_codec("powersgd", rank=4)), []
    for noise in noises:
        ring.exchange([[offset[0] + 0.1 * noise[0]], [-offset[0] + 0.1 * noise[1]]])
        norms.append(np.linalg.norm(ring.state("residual/gradient_0")[0]))
    assert norms[-1] < 2 * norms[29]


def test_orthonormal_columns():
    matrix = np.random.default_rng(0).normal(size=(50, 8)) @ np.diag(10.0 ** np.arange(-4, 4))
    basis = orthonormal(tf.constant(matrix, tf.float32)).numpy()
    np.testing.assert_allclose(basis.T @ basis, np.eye(8), atol=1e-5)
    # The same span: what is left of the matrix beside it is rounding.
    left = matrix - basis @ (basis.T @ matrix)
    assert np.all(np.linalg.norm(left, axis=0) <= 1e-5 * np.linalg.norm(matrix, axis=0))


def test_dependent_and_zero_columns_become_zero():
    column = np.random.default_rng(0).normal(size=(50, 1))
    basis = orthonormal(tf.constant(np.hstack([column, 0 * column, 3 * column]), tf.float32)).numpy()
    np.testing.assert_allclose(np.linalg.norm(basis, axis=0), [1, 0, 0], atol=1e-6)


def test_a_gradient_that_was_zero_once_is_not_zero_for_ever(make_ring):
    ring = make_ring(2, "powersgd", {"rank": 2})
    for gradient in (np.zeros(SHAPE, np.float32), low_rank(1)):
        np.testing.assert_allclose(ring.alike(gradient)[0], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("shape", "accepted"), [((3, 3, 64, 64), True), ((10, 10), False), ((1, 1, 64, 256), True)])
def test_tensors_that_hardly_shrink_travel_dense(shape, accepted, make_codec):
    # rank * (rows + columns) * 2 against rows * columns: 5120 and 36864, 160 and 100, 2560 and 16384.
    assert make_codec("powersgd", rank=4).accepts(shape) == accepted


def test_rank_by_step(make_ring, random_gradients, make_codec):
    ring = make_ring(2, make_codec("powersgd", rank=1, rank_schedule=[(2, 3)]))
    ranks = [np.linalg.matrix_rank(ring.exchange(random_gradients(2, ((72, 40),), seed=s))[0]) for s in range(4)]
    sent = [tensors[0][1] for _, tensors in ring.ranks[0].calls][::2]
    assert [(72, rank) for rank in ranks] == sent == [(72, 3), (72, 3), (72, 1), (72, 1)]
