"""What every codec promises, on 1, 2, 3 and 8 ranks."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.arithmetic.graph import GRADIENTS_NOT_FINITE, MEANS_NOT_FINITE
from models.compression.codecs.table import CODECS
from models.compression.exchange.resize import load_state, save_state

PARAMETERS = {
    "threshold": {"tau": 0.05},
    "topk": {"density": 0.1},
    "dgc": {"density": 0.1, "masking": False},
    "adaptive": {"density": 0.1},
    "randomk": {"density": 0.1},
    "powersgd": {"rank": 2},
}
WITH_RESIDUAL = ["onebit", "scaled_sign", "threshold", "adaptive", "topk", "randomk", "powersgd"]
EXACT = ["none", "fp16", "bf16"]
RANKS = [1, 2, 3, 8]
# A matrix, a kernel, one element, a size that neither 8 nor any number of ranks divides, more columns than rows.
SHAPES = ((40, 30), (3, 3, 6, 10), (1, 1), (7, 13), (2, 77))


@pytest.fixture
def build(make_codec):
    return lambda name: make_codec(name, **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_codec_is_known_by_its_own_name(name, build):
    assert build(name).name == name


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_came_out_and_the_residuals_sum_to_all_gradients(name, size, make_ring, random_gradients, build):
    ring = make_ring(size, build(name))
    shapes = SHAPES if size < 8 else SHAPES[3:]  # threads take turns: 8 ranks are slow
    sums = [np.zeros(shape, np.float64) for shape in shapes]
    sent = [np.zeros(shape, np.float64) for shape in shapes]
    for step in range(2):
        gradients = random_gradients(size, shapes, seed=step)
        for index, result in enumerate(ring.exchange(gradients)):
            sent[index] += result
            sums[index] += np.mean([each[index] for each in gradients], axis=0)
    for index, shape in enumerate(shapes):
        left = 0.0
        if ring.exchanges[0]._is_compressed(shape):
            left = ring.left_out(index, shape)
            assert np.any(left) or shape == (1, 1)
        scale = 10.0 ** (index % 3 - 1)
        np.testing.assert_allclose(sent[index] + left, sums[index], rtol=1e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", EXACT)
def test_roundings_give_the_mean(name, size, make_ring, random_gradients, build):
    gradients = random_gradients(size, SHAPES)
    relative = {"none": 1e-6, "fp16": 2**-9, "bf16": 2**-7}[name]
    for index, result in enumerate(make_ring(size, build(name)).exchange(gradients)):
        mean = np.mean([each[index] for each in gradients], axis=0)
        # Relative to the summands: their sum may be much smaller.
        bound = relative * np.mean([np.abs(each[index]) for each in gradients], axis=0)
        assert np.all(np.abs(result - mean) <= bound + 1e-12)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_zero_gradients_stay_zero_and_do_no_harm(name, make_ring, random_gradients, build):
    ring = make_ring(2, build(name))
    zeros = [[np.zeros(shape, np.float32) for shape in SHAPES] for _ in range(2)]
    for result in ring.exchange(zeros):
        np.testing.assert_array_equal(result, 0.0)
    gradients = random_gradients(2, SHAPES)
    moved = [0.0] * len(SHAPES)
    for _ in range(3):
        for index, result in enumerate(ring.exchange(gradients)):
            assert np.all(np.isfinite(result))
            moved[index] += float(np.abs(result).sum())
    assert min(moved) > 0


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
@pytest.mark.parametrize("name", sorted(set(CODECS) - {"fp16", "threshold"}))
def test_huge_and_tiny_values(name, magnitude, make_ring, random_gradients, build):
    gradients = [[tensor * np.float32(magnitude) for tensor in rank] for rank in random_gradients(2, ((24, 40),))]
    ring = make_ring(2, build(name))
    total = sum(np.abs(ring.exchange(gradients)[0]).max() for _ in range(3))
    assert np.isfinite(total)
    assert total > 1e-3 * magnitude


@pytest.mark.parametrize("magnitude", [1e5, 1e20, 1e38, 3.4e38])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_mean_at_the_edge_of_the_range_is_finite_or_stops_every_rank(name, magnitude, make_ring, build):
    """Weights are never NaN: an error comes before the update, and all ranks have it."""
    signs = np.where(np.random.default_rng(0).random((24, 40)) < 0.5, -1, 1)
    gradients = [[(signs * magnitude).astype(np.float32), np.full((30,), magnitude, np.float32)]] * 2
    ring = make_ring(2, build(name))
    weights = [np.ones_like(gradient) for gradient in gradients[0]]
    stopped = []
    for _ in range(4):
        try:
            means = ring.exchange(gradients)
        except tf.errors.InvalidArgumentError as error:
            stopped.append(error.message)
            break
        weights = [weight - 0.01 * mean for weight, mean in zip(weights, means, strict=True)]
    assert all(np.isfinite(weight).all() for weight in weights)
    assert all(f"codec {name}: {MEANS_NOT_FINITE}" in text or GRADIENTS_NOT_FINITE in text for text in stopped)
    if magnitude == 1e5:
        assert bool(stopped) == (name == "fp16")


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_a_mean_that_overflows_stops_all_ranks_and_names_codec_and_tensor(name, make_ring, build):
    gradients = [[np.ones((24, 40), np.float32), np.full((2, 3), 3e38, np.float32)]] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"codec {name}: {MEANS_NOT_FINITE}(?s:.*)gradient_1"):
        make_ring(2, build(name)).exchange(gradients)


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"norm_sparsifier", "onebit_adam", "dgc", "threshold"}))
def test_equal_elements_come_out_as_they_are_or_not_at_all(name, make_ring, build):
    (result,) = make_ring(2, build(name)).exchange([[np.full((24, 40), 0.5, np.float32)]] * 2)
    values = np.unique(result)
    assert np.all(np.isclose(values, 0.5, rtol=1e-5) | (values == 0)), values
    assert np.any(values != 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_gradient_that_is_not_finite_stops_with_rank_and_tensor(name, value, make_ring, build):
    ring = make_ring(2, build(name))
    gradients = [[np.ones((24, 40), np.float32), np.ones((30,), np.float32)] for _ in range(2)]
    gradients[1][1][3] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 1(?s:.*)gradient_1"):
        ring.exchange(gradients)
    ring = make_ring(2, build(name))
    gradients[1][1][3] = 1
    gradients[1][0][5, 5] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 1(?s:.*)gradient_0"):
        ring.exchange(gradients)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_state_restored_elsewhere_goes_on_alike(name, make_ring, random_gradients, build):
    first, second = make_ring(2, build(name)), make_ring(2, build(name))
    for step in range(2):
        first.exchange(random_gradients(2, SHAPES, seed=step))
    for source, target in zip(first.exchanges, second.exchanges, strict=True):
        target.build([tf.zeros(shape) for shape in SHAPES])
        assert [each.name for each in source.variables] == [each.name for each in target.variables]
        for own, other in zip(source.variables, target.variables, strict=True):
            other.assign(own)
    following = random_gradients(2, SHAPES, seed=9)
    for own, other in zip(first.exchange(following), second.exchange(following), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_was_left_out_survives_another_number_of_ranks(name, size, make_ring, random_gradients, build):
    shape = (40, 30)
    old, new = make_ring(2, build(name)), make_ring(size, build(name))
    for step in range(2):
        old.exchange(random_gradients(2, (shape,), seed=step))
    saved = [save_state(exchange) for exchange in old.exchanges]
    for exchange in new.exchanges:
        exchange.build([tf.zeros(shape)])
        load_state(exchange, saved)
        assert int(exchange.clock["step"]) == 2
    np.testing.assert_allclose(new.left_out(0, shape), old.left_out(0, shape), rtol=1e-5, atol=1e-5)


def test_state_of_another_codec_is_refused(make_ring, build):
    (one,), (other,) = make_ring(1, build("onebit")).exchanges, make_ring(1, build("none")).exchanges
    for exchange in (one, other):
        exchange.build([tf.zeros((4, 4))])
    with pytest.raises(ValueError, match="rank 0 is of another model or codec: 'owner_residual/gradient_0' differs"):
        load_state(one, [save_state(other)])


# XLA takes seconds for each. The usual tests compile one codec of each kind: QSGD, whose phases XLA compiles whole;
# random-k, a linear one; and the threshold, whose messages have any length, so that only some functions are compiled.
COMPILED = ("qsgd", "randomk", "threshold")


@pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.long) for name in sorted(CODECS)]
)
def test_compiled_step_equals_eager_one(name, equal_ranks, random_gradients, make_exchange, build):
    gradients = [tf.constant(each) for each in random_gradients(1, ((40, 30), (30,)))[0]]
    eager = make_exchange(build(name), equal_ranks(1), dense_below=0, jit_compile=False)
    compiled = make_exchange(build(name), equal_ranks(1), dense_below=0)
    step = tf.function(compiled.exchange)
    for _ in range(2):
        for own, other in zip(step(gradients), eager.exchange(gradients), strict=True):
            np.testing.assert_allclose(own, other, rtol=2e-4, atol=1e-5)
    assert compiled.metrics()["payload_bytes"] == eager.metrics()["payload_bytes"] > 0


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"norm_sparsifier", "threshold", "adaptive"}))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_payload_known_from_shapes_is_what_travels(name, size, make_ring, random_gradients, build):
    ring = make_ring(size, build(name))
    gradients = random_gradients(size)
    ring.exchange(gradients)
    expected = ring.exchanges[0].payload_bytes([tf.TensorSpec(each.shape) for each in gradients[0]])
    # Each tensor's own halves are rounded down.
    assert abs(expected - ring.exchanges[0].metrics()["payload_bytes"]) <= 2 * len(gradients[0])
