"""Values by step."""

import pytest
import tensorflow as tf

from models.compression.schemes.piecewise import PiecewiseConstant, density_by_step, elements_to_send


def test_a_value_holds_before_its_bound():
    schedule = PiecewiseConstant(0.001, [(2, 0.25), (5, 0.0625)])
    assert [int(schedule.pick(tf.constant(step), [25, 6, 1])) for step in (0, 1, 2, 4, 5, 100)] == [25, 25, 6, 6, 1, 1]


def test_constant_is_no_tensor():
    assert PiecewiseConstant(0.5).pick(tf.constant(3), [7]) == 7


@pytest.mark.parametrize("bounds", [(5, 2), (2, 2), (0,)])
def test_bounds_must_rise(bounds):
    with pytest.raises(ValueError, match=r"rising values of before_step, 1 or more, got"):
        PiecewiseConstant(1, [(bound, 1) for bound in bounds])


def test_a_scaled_density_is_at_most_everything():
    scaled = density_by_step(0.25, [(3, 0.75)]).scaled(2.0)
    assert (scaled.values, scaled.schedule) == ((1.0, 0.5), ((3, 1.0),))


def test_at_least_one_element_is_sent():
    density = density_by_step(0.001, [(4, 0.5)])
    assert [int(elements_to_send(density, tf.constant(step), 100)) for step in (3, 4)] == [50, 1]


@pytest.mark.parametrize("density", [0.0, 1.5])
def test_densities_of_a_schedule_are_parts(density):
    with pytest.raises(ValueError, match="density must be above 0 and at most 1"):
        density_by_step(0.5, [(3, density)])
