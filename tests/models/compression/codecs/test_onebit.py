"""1-bit SGD: one bit, two means a column."""

import numpy as np
import tensorflow as tf

from models.compression.codecs.onebit import OneBitQuantiser


def test_two_means_a_column_by_hand(encode):
    message, _, restored = encode(OneBitQuantiser(), [[1, -1], [3, -3], [-4, -5], [0, 1]])
    # Column 0: 1, 3 and 0, which counts as positive, have mean 4/3. Column 1: -1, -3, -5 have mean -3.
    np.testing.assert_allclose(restored, [[4 / 3, -3], [4 / 3, -3], [-4, -3], [4 / 3, 1]], rtol=1e-6)
    assert [(*part.shape, part.dtype) for part in message] == [
        (1, 1, 2, tf.uint8),  # 4 rows in a byte
        (1, 1, 2, tf.float32),
        (1, 1, 2, tf.float32),
    ]


def test_columns_of_one_sign_and_of_zeros(encode):
    _, remainder, restored = encode(OneBitQuantiser(), [[1, -2, 0], [3, -2, 0]])
    np.testing.assert_array_equal([restored, remainder], [[[2, -2, 0], [2, -2, 0]], [[-1, 0, 0], [1, 0, 0]]])
