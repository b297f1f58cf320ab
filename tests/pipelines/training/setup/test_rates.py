"""Schedules as the configuration states them."""

import math
from collections.abc import Sequence

import pytest

from conf.load import load
from conf.schema import RunConfig
from pipelines.training.setup.rates import boundary_steps, make_schedule, peak_learning_rate

COSINE = "schedule.decay={name: cosine, end_rate: 0.01}"
POLYNOMIAL = "schedule.decay={name: polynomial, power: 2, end_rate: 0.01}"


def recipe(settings: Sequence[str] = ()) -> RunConfig:
    """0.1 per 256 with a global batch of 256; 5 epochs of warm-up; a tenth at 30, 60, 80 of 90."""
    return load("sedona_resnet50", ["training.batch_size_per_worker=32", *settings])


ABSOLUTE = ["optimizer={name: lars, learning_rate: 7.4}", "schedule.warmup=none"]
BASE = "schedule.warmup={name: gradual, epochs: 5, start: base}"


@pytest.mark.parametrize(
    ("settings", "steps_per_epoch", "rates"),
    [
        # 0.1 * k * n / 256 with n = 32 images on k = 8 workers; 5 epochs of warm-up; /10 at 30, 60, 80 of 90.
        (
            [],
            10,
            {0: 0.1 / 50, 24: 0.1 * 25 / 50, 49: 0.1 * 8 * 32 / 256}
            | {299: 0.1, 300: 0.01, 309: 0.01, 599: 0.01, 609: 0.001, 799: 0.001, 809: 0.0001, 899: 0.0001},
        ),
        # The peak follows the number of workers, and an absolute one does not.
        (["launch.num_workers=64"], 10, {100: 0.8}),
        ([*ABSOLUTE, "launch.num_workers=1"], 10, {0: 7.4}),
        ([*ABSOLUTE, "launch.num_workers=64"], 10, {0: 7.4}),
        # Cosine and polynomial begin after the warm-up: 180 steps of warm-up, 3,060 of decay.
        *(
            (
                [decay, "training.epochs=90"],
                36,
                {179: 0.1, 180: 0.1, 180 + 765: 0.01 + 0.09 * quarter, 3240: 0.01},
            )
            for decay, quarter in ((COSINE, (1 + math.cos(math.pi / 4)) / 2), (POLYNOMIAL, 0.75**2))
        ),
        # The end rate may be reached early; 250 is half of 50 .. 450.
        (
            ["schedule.decay={name: polynomial, power: 1, end_rate: 0.02, epochs: 45}"],
            10,
            {250: 0.06, 450: 0.02, 899: 0.02},
        ),
        (
            ["schedule.warmup={name: constant, epochs: 5, factor: 0.25}", "schedule.decay=constant"],
            10,
            {0: 0.025, 49: 0.025, 50: 0.1, 899: 0.1},
        ),
        # A warm-up from the base rate is Goyal's: from 0.1 to 3.2 for a global batch of 8,192, in 50 equal parts.
        ([BASE, "launch.num_workers=256"], 10, {0: 0.1 + 3.1 / 50, 24: 0.1 + 3.1 / 2, 49: 3.2, 50: 3.2}),
        ([BASE, "launch.num_workers=8"], 10, {0: 0.1}),
    ],
)
def test_rates_by_hand(settings: list[str], steps_per_epoch: int, rates: dict[int, float]) -> None:
    schedule = make_schedule(recipe(settings), steps_per_epoch)
    assert {step: schedule(step) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("epochs", [9, 45, 180, 900])
@pytest.mark.parametrize("decay", ["schedule.decay=multi_step", COSINE, POLYNOMIAL])
def test_a_shorter_or_longer_run_keeps_the_shape(epochs: int, decay: str) -> None:
    published = make_schedule(recipe([decay]), steps_per_epoch=100)
    other = make_schedule(recipe([decay, f"training.epochs={epochs}"]), steps_per_epoch=100)
    for step in range(500, 9000, 10):
        assert other(step * epochs // 90) == pytest.approx(published(step)), step
    # Half of the warm-up is half of the peak, up to the part of one step.
    assert other(epochs * 100 * 5 // 90 // 2 - 1) == pytest.approx(published(249), rel=0.05)


def test_places_in_steps_stay_where_they_are_and_fractions_move() -> None:
    settings = [
        "schedule.warmup={name: gradual, steps: 7}",
        "schedule.decay.milestones=[{fraction: 0.5, factor: 0.1}]",
    ]
    for epochs in (2, 20):
        config = load("smoke", [*settings, f"training.epochs={epochs}"])
        assert boundary_steps(config.schedule, epochs, steps_per_epoch=10) == [
            ("schedule.warmup", 7),
            ("schedule.decay.milestones[0]", 5 * epochs),
        ]


def test_without_the_recipes_length_epochs_are_those_of_the_run() -> None:
    config = recipe(["schedule.recipe_epochs=null", "training.epochs=180"])
    assert [step for _, step in boundary_steps(config.schedule, 180, steps_per_epoch=10)] == [50, 300, 600, 800]
    with pytest.raises(ValueError, match=r"milestones\[2\] is at epoch 80, beyond .* \(training\.epochs=70\)"):
        recipe(["schedule.recipe_epochs=null", "training.epochs=70"])
    rooted = recipe(["launch.num_workers=32", "optimizer.scaling=sqrt"])
    assert peak_learning_rate(rooted.optimizer, rooted.global_batch_size) == pytest.approx(0.2)  # 0.1 * sqrt(4)


def test_a_base_rate_above_the_peak_is_refused() -> None:
    message = r"start=base begins with 0\.1, .* above the peak for 32, 0\.0125: set schedule\.warmup\.start=zero, or a"
    with pytest.raises(ValueError, match=message):
        make_schedule(recipe([BASE, "launch.num_workers=1"]), steps_per_epoch=10)
    with pytest.raises(ValueError, match=r"^--set schedule\.warmup\.start=base is the rate for .* of 256"):
        load("smoke", ["optimizer={learning_rate: 7.4}", "schedule.warmup.start=base"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["schedule.warmup={steps: 21}"], r"schedule\.warmup is at step 21, beyond the end of the run \(20 steps\)$"),
        (["schedule.warmup={steps: 11}"], r"milestones\[0\] is at step 10, before schedule\.warmup at step 11: must"),
        (["schedule.decay={name: cosine, steps: 5}"], r"schedule\.decay is at step 5, before schedule\.warmup"),
        (
            ["schedule.decay={name: cosine, end_rate: 0.3}"],
            r"schedule\.decay\.end_rate=0\.3 is above the peak .* 0\.25",
        ),
    ],
)
def test_places_that_only_the_number_of_steps_shows_to_be_wrong(settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(load("smoke", settings), steps_per_epoch=10)


@pytest.mark.parametrize("decay", ["multi_step", "cosine", "polynomial", "constant"])
@pytest.mark.parametrize(("epochs", "steps_per_epoch"), [(1, 1), (1, 3), (2, 2), (5, 1)])
def test_very_short_runs_have_a_rate_for_every_step(decay: str, epochs: int, steps_per_epoch: int) -> None:
    schedule = make_schedule(recipe([f"schedule.decay={decay}", f"training.epochs={epochs}"]), steps_per_epoch)
    assert all(0 < schedule(step) <= 0.1 for step in range(epochs * steps_per_epoch))
