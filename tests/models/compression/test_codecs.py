"""What every codec promises, and the roundings of each."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.fp16 import Fp16Codec
from models.compression.table import CODECS


@pytest.mark.parametrize("name", sorted(CODECS))
def test_codec_is_known_by_its_own_name(name):
    assert CODECS[name]().name == name


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("shape", [(4, 6), (3, 3, 2, 5)])
def test_round_trip_keeps_shape_and_dtype(name, shape):
    codec = CODECS[name]()
    tensor = tf.random.stateless_normal(shape, (1, 2))
    decoded = tf.function(lambda each: codec.decode(codec.encode(each)))(tensor)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tf.float32)


@pytest.mark.parametrize("name", sorted(name for name, build in CODECS.items() if build().linear))
def test_linear_codec_may_sum_before_it_decodes(name):
    codec = CODECS[name]()
    a, b = tf.random.stateless_normal((32, 32), (1, 2)), tf.random.stateless_normal((32, 32), (3, 4))
    separately = codec.decode(codec.encode(a)) + codec.decode(codec.encode(b))
    np.testing.assert_allclose(codec.decode(codec.encode(a) + codec.encode(b)), separately, rtol=2e-3, atol=2e-3)


def test_none_is_exact():
    tensor = tf.random.stateless_normal((32, 32), (1, 2))
    codec = CODECS["none"]()
    np.testing.assert_array_equal(codec.decode(codec.encode(tensor)), tensor)


def test_fp16_rounds_to_eleven_bits():
    codec = Fp16Codec()
    tensor = tf.random.stateless_normal((64, 64), (1, 2))
    np.testing.assert_allclose(codec.decode(codec.encode(tensor)), tensor, rtol=2**-11)
    # 2048 is the last integer with neighbours one apart; ties go to even.
    np.testing.assert_array_equal(codec.decode(codec.encode(tf.constant([2047.0, 2049.0, 2051.0]))), [2047, 2048, 2052])


def test_fp16_range():
    decoded = Fp16Codec().decode(Fp16Codec().encode(tf.constant([65504.0, 1e5, 6e-8, 1e-8])))
    np.testing.assert_allclose(decoded, [65504, np.inf, 2**-24, 0])
