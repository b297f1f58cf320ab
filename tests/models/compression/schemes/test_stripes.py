"""Cutting tensors into a part a rank and joining them."""

import numpy as np
import pytest
import tensorflow as tf

from models.compression.schemes.stripes import ColumnLayout, FlatLayout, clear_padding

LAYOUTS = [FlatLayout(1), FlatLayout(8), FlatLayout(512), ColumnLayout()]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (3, 3, 5, 64), (2, 1030)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_and_padding(layout, shape, size):
    tensor = tf.reshape(tf.range(1.0, np.prod(shape) + 1), shape)
    parts = layout.split(tensor, size)
    assert parts.shape == (size, *layout.part_shape(shape, size))
    np.testing.assert_array_equal(layout.join(parts, shape), tensor)
    real = layout.real(shape, size)
    np.testing.assert_array_equal(clear_padding(tf.ones_like(parts), real), tf.cast(parts > 0, tf.float32))
    for rank in range(size):
        alone = clear_padding(tf.ones_like(parts[rank : rank + 1]), real[rank : rank + 1])
        np.testing.assert_array_equal(alone[0], parts[rank] > 0)


def test_columns_stay_whole():
    np.testing.assert_array_equal(
        ColumnLayout().split(tf.constant([[1, 2, 3], [4, 5, 6]], tf.float32), 2), [[[1, 2], [4, 5]], [[3, 0], [6, 0]]]
    )


@pytest.mark.parametrize(("elements", "size", "expected"), [(2048, 2, 1024), (1000, 1, 1024), (100, 1, 104), (3, 8, 8)])
def test_parts_are_whole_multiples_unless_small(elements, size, expected):
    assert FlatLayout(512).part_shape((elements,), size) == (expected,)
