"""Schedules against the values of Goyal et al. 2017."""

import pytest

from models.schedules import gradual_warmup, multi_step, scaled_learning_rate

GOYAL = ((30 / 90, 0.1), (60 / 90, 0.01), (80 / 90, 0.001))


def test_linear_scaling_is_that_of_goyal():
    workers, batch_size_per_worker = 32, 256
    assert scaled_learning_rate(0.1, workers * batch_size_per_worker, "linear") == pytest.approx(
        3.2
    )  # 0.1 * 8192 / 256
    assert scaled_learning_rate(0.1, 256, "linear") == pytest.approx(0.1)
    assert scaled_learning_rate(0.1, 64, "linear") == pytest.approx(0.025)


def test_sqrt_scaling():
    assert scaled_learning_rate(0.1, 4096, "sqrt") == pytest.approx(0.4)  # 0.1 * sqrt(16)


def test_steps_drop_at_30_60_and_80_of_90_epochs():
    steps_per_epoch = 7
    rate = multi_step(3.2, 90 * steps_per_epoch, GOYAL)
    for first_epoch, last_epoch, factor in [(0, 29, 1.0), (30, 59, 0.1), (60, 79, 0.01), (80, 89, 0.001)]:
        assert rate(first_epoch * steps_per_epoch) == pytest.approx(3.2 * factor)
        assert rate(last_epoch * steps_per_epoch + steps_per_epoch - 1) == pytest.approx(3.2 * factor)


def test_boundaries_are_exact_for_any_number_of_steps_per_epoch():
    for steps_per_epoch in [*range(1, 400), 5004, 65537]:
        rate = multi_step(1.0, 90 * steps_per_epoch, GOYAL)
        around = [rate(epoch * steps_per_epoch + offset) for epoch in (30, 60, 80) for offset in (-1, 0)]
        assert around == [1.0, 0.1, 0.1, 0.01, 0.01, 0.001], steps_per_epoch


def test_boundary_is_exact_where_floats_are_not():
    rate = multi_step(1.0, 100, [(0.55, 0.5)])
    assert (rate(54), rate(55)) == (1.0, 0.5)


def test_boundary_between_two_steps_takes_effect_at_the_next():
    rate = multi_step(1.0, 5, [(0.5, 0.5)])  # 2.5 steps
    assert [rate(step) for step in range(5)] == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_without_milestones_the_peak_stays():
    rate = multi_step(0.3, 10, [])
    assert {rate(step) for step in (0, 1, 10**6)} == {0.3}


def test_warmup_rises_by_equal_parts_to_the_schedule():
    rate = gradual_warmup(lambda step: 0.8, 4)
    assert [rate(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_warmup_multiplies_the_schedule_beneath():
    rate = gradual_warmup(multi_step(1.0, 10, [(0.2, 0.5)]), 4)
    assert [rate(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.5 * 0.75, 0.5, 0.5])


def test_no_warmup_is_the_schedule_itself():
    assert gradual_warmup(lambda step: 0.8, 0)(0) == 0.8


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: scaled_learning_rate(0.1, 256, "log"), "'log'"),
        (lambda: scaled_learning_rate(0.1, 0, "linear"), "global_batch_size must be positive, got 0"),
        (lambda: scaled_learning_rate(-0.1, 256, "linear"), "rate_per_256 must be positive, got -0.1"),
        (lambda: multi_step(0.0, 10, GOYAL), "peak must be positive"),
        (lambda: multi_step(1.0, 0, GOYAL), "total_steps must be positive, got 0"),
        (lambda: multi_step(1.0, 10, [(0.5, 0.1), (0.3, 0.01)]), r"must rise within \[0, 1\], got \[0.5, 0.3\]"),
        (lambda: multi_step(1.0, 10, [(0.5, 0.1), (0.5, 0.01)]), "must rise"),
        (lambda: multi_step(1.0, 10, [(30.0, 0.1)]), "must rise within"),
        (lambda: multi_step(1.0, 10, [(0.5, 0.0)]), "milestone factor must be positive"),
        (lambda: gradual_warmup(lambda step: 1.0, -1), "warmup_steps must not be negative, got -1"),
    ],
)
def test_values_that_make_no_schedule_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()
