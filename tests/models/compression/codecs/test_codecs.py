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
# A matrix, a kernel, one element, a size that neither 8 nor any number of ranks divides, more columns than rows.
SHAPES = ((40, 30), (3, 3, 6, 10), (1, 1), (7, 13), (2, 77))


@pytest.fixture
def build(make_codec):
    return lambda name: make_codec(name, **PARAMETERS.get(name, {}))


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_came_out_and_the_residuals_sum_to_all_gradients(name, size, make_ring, random_gradients, build):
    ring = make_ring(size, build(name))
    shapes = SHAPES if size < 8 else SHAPES[3:]  # threads take turns: 8 ranks are slow
    steps = [random_gradients(size, shapes, seed=step) for step in range(2)]
    sent = [np.sum(results, axis=0) for results in zip(*map(ring.exchange, steps), strict=True)]
    states = {entry.name for entry in ring.exchanges[0].state}
    for index, shape in enumerate(shapes):
        left = 0.0
        if f"residual/gradient_{index}" in states:
            left = ring.left_out(index, shape)
            assert np.any(left) or shape == (1, 1)
        expected = np.sum([np.mean([each[index] for each in step], axis=0) for step in steps], axis=0)
        np.testing.assert_allclose(sent[index] + left, expected, rtol=1e-5, atol=2e-5 * 10.0 ** (index % 3 - 1))


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("name", "relative"), [("none", 1e-6), ("fp16", 2**-9), ("bf16", 2**-7)])
def test_roundings_give_the_mean(name, relative, size, make_ring, random_gradients, build):
    gradients = random_gradients(size, SHAPES)
    for index, result in enumerate(make_ring(size, build(name)).exchange(gradients)):
        tensors = [each[index] for each in gradients]
        # Relative to the summands: their sum may be much smaller.
        bound = relative * np.mean(np.abs(tensors), axis=0)
        assert np.all(np.abs(result - np.mean(tensors, axis=0)) <= bound + 1e-12)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_zero_gradients_stay_zero_and_do_no_harm(name, make_ring, random_gradients, build):
    ring, gradients = make_ring(2, build(name)), random_gradients(2, SHAPES)
    assert ring.exchanges[0].codec.name == name
    for result in ring.alike(*(np.zeros(shape, np.float32) for shape in SHAPES)):
        np.testing.assert_array_equal(result, 0.0)
    moved = np.sum([[np.abs(result).sum() for result in ring.exchange(gradients)] for _ in range(3)], axis=0)
    assert np.all(np.isfinite(moved) & (moved > 0))


@pytest.mark.parametrize("magnitude", [1e30, 1e-30])
@pytest.mark.parametrize("name", sorted(set(CODECS) - {"fp16", "threshold"}))
def test_huge_and_tiny_values(name, magnitude, make_ring, random_gradients, build):
    gradients = [[tensor * np.float32(magnitude) for tensor in rank] for rank in random_gradients(2, ((24, 40),))]
    ring = make_ring(2, build(name))
    assert 1e-3 * magnitude < sum(np.abs(ring.exchange(gradients)[0]).max() for _ in range(3)) < np.inf


@pytest.mark.parametrize("magnitude", [1e5, 1e20, 3.4e38])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_mean_at_the_edge_of_the_range_is_finite_or_stops_every_rank(name, magnitude, make_ring, build):
    """Weights are never NaN: an error comes before the update, and all ranks have it."""
    signs = np.where(np.random.default_rng(0).random((24, 40)) < 0.5, -1, 1)
    gradients = [(signs * magnitude).astype(np.float32), np.full((30,), magnitude, np.float32)]
    ring, stopped = make_ring(2, build(name)), ""
    for _ in range(4):
        try:
            means = ring.alike(*gradients)
        except tf.errors.InvalidArgumentError as error:
            stopped = error.message
            break
        assert all(np.isfinite(mean).all() for mean in means)
    assert not stopped or f"codec {name}: {MEANS_NOT_FINITE}" in stopped or GRADIENTS_NOT_FINITE in stopped
    assert magnitude > 1e5 or bool(stopped) == (name == "fp16")


@pytest.mark.parametrize("name", ["none", "fp16"])
def test_a_mean_that_overflows_stops_all_ranks_and_names_codec_and_tensor(name, make_ring, build):
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"codec {name}: {MEANS_NOT_FINITE}(?s:.*)gradient_1"):
        make_ring(2, build(name)).alike(np.ones((24, 40), np.float32), np.full((2, 3), 3e38, np.float32))


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"norm_sparsifier", "onebit_adam", "dgc", "threshold"}))
def test_equal_elements_come_out_as_they_are_or_not_at_all(name, make_ring, build):
    values = np.unique(make_ring(2, build(name)).alike(np.full((24, 40), 0.5, np.float32)))
    assert np.all(np.isclose(values, 0.5, rtol=1e-5) | (values == 0)), values
    assert np.any(values != 0)


@pytest.mark.parametrize(("value", "place"), [(np.nan, 0), (np.inf, 0), (np.nan, 1)])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_gradient_that_is_not_finite_stops_with_rank_and_tensor(name, value, place, make_ring, build):
    gradients = [[np.ones((24, 40), np.float32), np.ones((30,), np.float32)] for _ in range(2)]
    gradients[1][place].flat[3] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"rank 1(?s:.*)gradient_{place}"):
        make_ring(2, build(name)).exchange(gradients)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_state_restored_elsewhere_goes_on_alike(name, make_ring, random_gradients, build):
    first, second = make_ring(2, build(name)), make_ring(2, build(name))
    for step in range(2):
        first.exchange(random_gradients(2, SHAPES, seed=step))
    load_all(second, first, *SHAPES)
    following = random_gradients(2, SHAPES, seed=9)
    np.testing.assert_equal(first.exchange(following), second.exchange(following))


def load_all(ring, other, *shapes):
    """Every rank loads what all ranks of the other ring save."""
    saved = [save_state(exchange) for exchange in other.exchanges]
    for exchange in ring.exchanges:
        exchange.build([tf.zeros(shape) for shape in shapes])
        load_state(exchange, saved)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", WITH_RESIDUAL)
def test_what_was_left_out_survives_another_number_of_ranks(name, size, make_ring, random_gradients, build):
    shape = (40, 30)
    old, new = make_ring(2, build(name)), make_ring(size, build(name))
    for step in range(2):
        old.exchange(random_gradients(2, (shape,), seed=step))
    load_all(new, old, shape)
    assert [int(exchange.clock["step"]) for exchange in new.exchanges] == [2] * size
    np.testing.assert_allclose(new.left_out(0, shape), old.left_out(0, shape), rtol=1e-5, atol=1e-5)
    for entry, earlier in zip(new.exchanges[-1].state, old.exchanges[0].state, strict=True):
        if entry.spec.scope == "shared":
            np.testing.assert_array_equal(entry.variable, earlier.variable)


def test_state_of_another_codec_is_refused(make_ring, build):
    one, other = make_ring(1, build("onebit")), make_ring(1, build("none"))
    other.alike(np.zeros((4, 4), np.float32))
    with pytest.raises(ValueError, match="rank 0 is of another model or codec: 'owner_residual/gradient_0' differs"):
        load_all(one, other, (4, 4))


# XLA takes seconds for each. The usual tests compile one codec of each kind: QSGD, whose phases XLA compiles whole;
# random-k, a linear one; and the threshold, whose messages have any length, so that only some functions are compiled.
COMPILED = ("qsgd", "randomk", "threshold")


@pytest.mark.parametrize(
    "name", [name if name in COMPILED else pytest.param(name, marks=pytest.mark.long) for name in sorted(CODECS)]
)
def test_compiled_step_equals_eager_one(name, random_gradients, make_exchange, build):
    gradients = [tf.constant(each) for each in random_gradients(1, ((40, 30), (30,)))[0]]
    eager = make_exchange(build(name), 1, dense_below=0, jit_compile=False)
    compiled = make_exchange(build(name), 1, dense_below=0)
    step = tf.function(compiled.exchange)
    for _ in range(2):
        for own, other in zip(step(gradients), eager.exchange(gradients), strict=True):
            np.testing.assert_allclose(own, other, rtol=2e-4, atol=1e-5)
    assert compiled.metrics().payload_bytes == eager.metrics().payload_bytes > 0


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"norm_sparsifier", "threshold", "adaptive"}))
@pytest.mark.parametrize("size", [1, 3])
def test_payload_known_from_shapes_is_what_travels(name, size, make_ring, random_gradients, build):
    ring, gradients = make_ring(size, build(name)), random_gradients(size)
    ring.exchange(gradients)
    expected = ring.exchanges[0].payload_bytes([tf.TensorSpec(each.shape) for each in gradients[0]])
    # Each tensor's own halves are rounded down.
    assert abs(expected - ring.exchanges[0].metrics().payload_bytes) <= 2 * len(gradients[0])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("topk", {"density": 0.0}, "density must be above 0 and at most 1, got 0"),
        ("topk", {"density": 1.5}, "density must be above 0 and at most 1, got 1.5"),
        ("randomk", {"density": 0.0}, "density must be"),
        ("dgc", {"density": 0.0}, "density must be"),
        ("topk", {"owner_factor": 0.5}, r"owner_factor must be at least 1, got 0\.5"),
        ("dgc", {"momentum": 1.0}, "momentum must be"),
        ("dgc", {"clip_norm": 0.0}, "clip_norm must be"),
        ("powersgd", {"rank": 0}, "rank must be at least 1, got"),
        ("powersgd", {"min_compression": 0.5}, "min_compression must be at least 1, got"),
        ("onebit_adam", {"beta_1": 1.0}, r"beta_1 must be in \[0, 1\), got 1.0"),
        *(("qsgd", {"bits": bits}, f"bits must be 2 to 8, got {bits}") for bits in (1, 9)),
        ("qsgd", {"bucket_size": 12}, "bucket_size must be a positive multiple of 8, got 12"),
        *(("qsgd", {"owner_bits": n}, f"owner_bits must be 2 to 8, 32 or None, got {n}") for n in (1, 9, 16)),
        ("threshold", {"tau": 0}, "tau must be positive, got 0"),
        *((name, {"prescale": 0}, "prescale must be positive, got 0") for name in ("fp16", "bf16")),
    ],
)
def test_settings_out_of_range_are_refused(name, settings, message, make_codec):
    with pytest.raises(ValueError, match=message):
        make_codec(name, **settings)


def through(ring, *values):
    return ring.alike(np.array([values], np.float32))[0][0]


@pytest.mark.parametrize(
    ("size", "name", "settings", "values", "expected", "rtol"),
    [
        (1, "fp16", {}, [2047, 2049, 2051], [2047, 2048, 2052], 0),  # eleven bits, ties to even
        (1, "fp16", {"sum_in_float32": True}, [2047, 2049, 2051], [2047, 2048, 2052], 0),
        (1, "fp16", {}, [65504, 6e-8, 1e-8], [65504, 2**-24, 0], 0),
        (4, "fp16", {}, [40000], [40000], 0),  # their sum, 160000, is beyond 65504
        (1, "bf16", {}, [255, 257, 259], [255, 256, 260], 0),  # eight bits, and the range of float32
        (2, "bf16", {}, [1e38, 1e-37], [1e38, 1e-37], 2**-8),
        (2, "fp16", {"prescale": 2.0**16}, [1e-8, 0.5], [1e-8, 0.5], 2**-10),
        (2, "fp16", {"prescale": 2.0**-8, "sum_in_float32": True}, [1e6, 1e7], [1e6, 1e7], 2**-10),
        (2, "bf16", {"prescale": 2.0**64}, [1e-30], [1e-30], 2**-8),
    ],
)
def test_numbers_that_every_rank_sends(size, name, settings, values, expected, rtol, make_ring):
    ring = make_ring(size, name, settings)
    np.testing.assert_allclose(through(ring, *values), expected, rtol=rtol)
    as_bytes = name == "bf16" or "sum_in_float32" in settings
    assert ring.ranks[0].calls[0][1][0][0] == (tf.uint8 if as_bytes else tf.float16)


@pytest.mark.parametrize(("error_feedback", "mean"), [(True, 257), (False, 256)])
def test_error_feedback_sends_what_the_rounding_lost(error_feedback, mean, make_ring):
    ring = make_ring(1, "bf16", {"error_feedback": error_feedback})
    assert sum(through(ring, 257.0)[0] for _ in range(16)) / 16 == pytest.approx(mean, abs=0.3 if error_feedback else 0)
