"""Values by step."""

import pytest
import tensorflow as tf

from models.compression.schemes.piecewise import PiecewiseConstant


def test_a_value_holds_before_its_bound():
    schedule = PiecewiseConstant(0.001, [(2, 0.25), (5, 0.0625)])
    picked = [int(schedule.pick(tf.constant(step), [25, 6, 1])) for step in (0, 1, 2, 4, 5, 100)]
    assert picked == [25, 25, 6, 6, 1, 1]


def test_constant_is_no_tensor():
    assert PiecewiseConstant(0.5).pick(tf.constant(3), [7]) == 7


@pytest.mark.parametrize("bounds", [(5, 2), (2, 2), (0,)])
def test_bounds_must_rise(bounds):
    with pytest.raises(ValueError, match=r"rising values of before_step, 1 or more, got"):
        PiecewiseConstant(1, [(bound, 1) for bound in bounds])
