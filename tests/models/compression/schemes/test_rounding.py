"""Half and brain floats."""

import numpy as np
import pytest
import tensorflow as tf


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


def test_fp16_has_a_largest_number(make_ring):
    with pytest.raises(tf.errors.InvalidArgumentError, match="codec fp16: these means of finite gradients are not"):
        through(make_ring(1, "fp16"), 1e5)


@pytest.mark.parametrize(("error_feedback", "mean"), [(True, 257), (False, 256)])
def test_error_feedback_sends_what_the_rounding_lost(error_feedback, mean, make_ring):
    ring = make_ring(1, "bf16", {"error_feedback": error_feedback})
    assert sum(through(ring, 257.0)[0] for _ in range(16)) / 16 == pytest.approx(mean, abs=0.3 if error_feedback else 0)
