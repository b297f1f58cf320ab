"""Schedules against the values of Goyal et al. 2017."""

import pytest

from models.schedules import (
    constant,
    constant_warmup,
    cosine,
    gradual_warmup,
    multi_step,
    polynomial,
    scaled_learning_rate,
    step_at,
)

GOYAL = ((30 / 90, 0.1), (60 / 90, 0.01), (80 / 90, 0.001))


@pytest.mark.parametrize(
    ("global_batch_size", "rule", "expected"),
    [
        (32 * 256, "linear", 3.2),  # 0.1 * 8192 / 256
        (256, "linear", 0.1),
        (64, "linear", 0.025),
        (4096, "sqrt", 0.4),  # 0.1 * sqrt(16)
    ],
)
def test_scaling_is_that_of_goyal_or_its_root(global_batch_size, rule, expected):
    assert scaled_learning_rate(0.1, global_batch_size, rule) == pytest.approx(expected)


def test_boundaries_are_exact_for_any_number_of_steps_per_epoch():
    for steps_per_epoch in [*range(1, 400), 5004, 65537]:
        total_steps = 90 * steps_per_epoch
        rate = multi_step(1.0, [(step_at(fraction, total_steps), factor) for fraction, factor in GOYAL])
        around = [rate(epoch * steps_per_epoch + offset) for epoch in (30, 60, 80) for offset in (-1, 0)]
        assert around == [1.0, 0.1, 0.1, 0.01, 0.01, 0.001], steps_per_epoch


def test_boundary_between_two_steps_takes_effect_at_the_next():
    assert step_at(0.55, 100) == 55  # where floats are not exact
    assert [step_at(fraction, 5) for fraction in (0.0, 0.5, 1.0)] == [0, 3, 5]  # 2.5 steps


@pytest.mark.parametrize(
    ("rate", "least", "parts"),
    [
        # MLPerf's batch of 8,192, with 10 steps an epoch: 17 falls to 1e-4 in the 37 epochs after 5 of warm-up.
        (
            polynomial(17.0, start_step=50, end_step=420, power=2, end_rate=1e-4),
            1e-4,
            {0: 1, 50: 1, 235: 1 / 4, 419: 1 / 370**2, 420: 0, 10**6: 0},  # half-way at 235
        ),
        (cosine(0.8, start_step=10, end_step=110, end_rate=0.2), 0.2, {9: 1, 10: 1, 60: 1 / 2, 110: 0}),
        (cosine(1.0, start_step=0, end_step=3, end_rate=0.0), 0.0, {1: 3 / 4}),  # cos(pi / 3) is 1/2
    ],
    ids=["polynomial", "cosine", "cosine of three steps"],
)
def test_rates_fall_from_the_peak_by_hand(rate, least, parts):
    expected = [least + (rate(0) - least) * part for part in parts.values()]
    assert [rate(step) for step in parts] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rate", "first"),
    [
        (multi_step(0.3, []), [0.3, 0.3]),
        (constant(0.3), [0.3, 0.3]),
        (multi_step(1.0, [(1, 0.5), (1, 0.1)]), [1.0, 0.1]),  # of two milestones at one step the second holds
        (polynomial(1.0, start_step=1, end_step=1, power=2, end_rate=0.1), [1.0, 0.1]),  # an interval without steps
        (constant_warmup(constant(0.8), 2, 0.25), [0.2, 0.2, 0.8, 0.8]),
        (gradual_warmup(constant(0.8), 0), [0.8]),
        (gradual_warmup(constant(0.8), 4), [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]),
        # 0.1 to 3.2 in 5 parts of 0.62
        (gradual_warmup(constant(3.2), 5, start_rate=0.1), [0.72, 1.34, 1.96, 2.58, 3.2, 3.2]),
        (gradual_warmup(multi_step(1.0, [(2, 0.5)]), 4), [0.25, 0.5, 0.5 * 0.75, 0.5, 0.5]),
    ],
)
def test_first_rates_by_hand(rate, first):
    assert [rate(step) for step in range(len(first))] == pytest.approx(first)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: scaled_learning_rate(0.1, 256, "log"), "'log'"),
        (lambda: scaled_learning_rate(0.1, 0, "linear"), "global_batch_size must be positive, got 0"),
        (lambda: scaled_learning_rate(-0.1, 256, "linear"), "rate_per_256 must be positive, got -0.1"),
        (lambda: step_at(0.5, 0), "total_steps must be positive, got 0"),
        (lambda: step_at(1.1, 10), r"fraction must be in \[0, 1\], got 1\.1"),
        (lambda: constant(0.0), "peak must be positive"),
        (lambda: multi_step(0.0, []), "peak must be positive"),
        (lambda: multi_step(1.0, [(5, 0.1), (3, 0.01)]), r"must not fall, from step 0, got \[5, 3\]"),
        (lambda: multi_step(1.0, [(5, 0.0)]), "milestone factor must be positive"),
        (lambda: polynomial(1.0, start_step=5, end_step=4, power=2, end_rate=0), "must rise from 0, got 5 and 4"),
        (lambda: polynomial(1.0, start_step=0, end_step=4, power=0, end_rate=0), "power must be positive, got 0"),
        (lambda: cosine(1.0, start_step=0, end_step=4, end_rate=1.5), r"in \[0, peak\], got end_rate 1\.5 and peak 1"),
        (lambda: cosine(1.0, start_step=0, end_step=4, end_rate=-0.5), "got end_rate -0.5"),
        (lambda: constant_warmup(constant(1.0), 3, 0.0), "factor must be positive, got 0.0"),
        (lambda: constant_warmup(constant(1.0), -1, 0.5), "warmup_steps must not be negative, got -1"),
        (lambda: gradual_warmup(lambda step: 1.0, -1), "warmup_steps must not be negative, got -1"),
        (lambda: gradual_warmup(constant(1.0), 3, start_rate=-0.1), "start_rate must not be negative, got -0.1"),
    ],
)
def test_values_that_make_no_schedule_are_rejected(build, message):
    with pytest.raises(ValueError, match=message):
        build()
