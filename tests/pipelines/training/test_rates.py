"""Schedules as the configuration states them."""

import math
from collections.abc import Sequence

import pytest

from conf.load import load
from conf.schema import RunConfig
from pipelines.training.rates import boundary_steps, make_schedule, peak_learning_rate

COSINE = "schedule.decay={name: cosine, end_rate: 0.01}"
POLYNOMIAL = "schedule.decay={name: polynomial, power: 2, end_rate: 0.01}"


def recipe(settings: Sequence[str] = ()) -> RunConfig:
    """0.1 per 256 with a global batch of 256; 5 epochs of warm-up; a tenth at 30, 60, 80 of 90."""
    return load("sedona_resnet50", ["training.batch_size_per_worker=32", *settings])


def test_the_recipe_is_goyals() -> None:
    # 0.1 * k * n / 256 with n = 32 images on k = 8 workers; 5 epochs of warm-up; /10 at 30, 60, 80 of 90.
    schedule = make_schedule(recipe(), steps_per_epoch=10)
    assert schedule(49) == pytest.approx(0.1 * 8 * 32 / 256)
    assert schedule(0) == pytest.approx(0.1 / 50)
    assert schedule(24) == pytest.approx(0.1 * 25 / 50)
    for epoch, factor in ((29, 1), (30, 0.1), (59, 0.1), (60, 0.01), (79, 0.01), (80, 0.001), (89, 0.001)):
        assert schedule(epoch * 10 + 9) == pytest.approx(0.1 * factor), epoch
    assert schedule(299) == pytest.approx(0.1)
    assert schedule(300) == pytest.approx(0.01)


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
        places = [("schedule.warmup", 7), ("schedule.decay.milestones[0]", 5 * epochs)]
        assert boundary_steps(config, steps_per_epoch=10) == places


def test_without_the_recipes_length_epochs_are_those_of_the_run() -> None:
    config = recipe(["schedule.recipe_epochs=null", "training.epochs=180"])
    assert [step for _, step in boundary_steps(config, steps_per_epoch=10)] == [50, 300, 600, 800]
    with pytest.raises(ValueError, match=r"milestones\[2\] is at epoch 80, beyond .* \(training\.epochs=70\)"):
        recipe(["schedule.recipe_epochs=null", "training.epochs=70"])


def test_the_peak_follows_the_number_of_workers() -> None:
    schedule = make_schedule(recipe(["launch.num_workers=64"]), steps_per_epoch=10)
    assert schedule(100) == pytest.approx(0.8)
    rooted = recipe(["launch.num_workers=32", "optimizer.scaling=sqrt"])
    assert peak_learning_rate(rooted) == pytest.approx(0.2)  # 0.1 * sqrt(4)


def test_an_absolute_peak_does_not() -> None:
    settings = ["optimizer={name: lars, learning_rate: 7.4}", "schedule.warmup=none"]
    for workers in (1, 64):
        assert make_schedule(recipe([*settings, f"launch.num_workers={workers}"]), steps_per_epoch=10)(0) == 7.4


def test_cosine_and_polynomial_begin_after_the_warm_up() -> None:
    for decay, quarter in ((COSINE, (1 + math.cos(math.pi / 4)) / 2), (POLYNOMIAL, 0.75**2)):
        schedule = make_schedule(recipe([decay, "training.epochs=90"]), steps_per_epoch=36)
        # 180 steps of warm-up, 3,060 of decay.
        assert schedule(179) == schedule(180) == pytest.approx(0.1)
        assert schedule(180 + 765) == pytest.approx(0.01 + 0.09 * quarter)
        assert schedule(3240) == 0.01


def test_the_end_rate_may_be_reached_early() -> None:
    decay = "schedule.decay={name: polynomial, power: 1, end_rate: 0.02, epochs: 45}"
    schedule = make_schedule(recipe([decay]), steps_per_epoch=10)
    assert schedule(250) == pytest.approx(0.06)  # half of 50 .. 450
    assert schedule(450) == schedule(899) == 0.02


def test_constant_warm_up_and_constant_rate() -> None:
    settings = ["schedule.warmup={name: constant, epochs: 5, factor: 0.25}", "schedule.decay=constant"]
    schedule = make_schedule(recipe(settings), steps_per_epoch=10)
    assert (schedule(0), schedule(49), schedule(50), schedule(899)) == (0.025, 0.025, 0.1, 0.1)


def test_a_warm_up_from_the_base_rate_is_goyals() -> None:
    settings = ["launch.num_workers=256", "schedule.warmup={name: gradual, epochs: 5, start: base}"]
    schedule = make_schedule(recipe(settings), steps_per_epoch=10)
    # From 0.1 to 3.2 for a global batch of 8,192, in 50 equal parts.
    assert schedule(0) == pytest.approx(0.1 + 3.1 / 50)
    assert schedule(24) == pytest.approx(0.1 + 3.1 / 2)
    assert schedule(49) == schedule(50) == pytest.approx(3.2)


def test_a_base_rate_above_the_peak_is_refused() -> None:
    base = "schedule.warmup={name: gradual, epochs: 5, start: base}"
    assert make_schedule(recipe([base, "launch.num_workers=8"]), steps_per_epoch=10)(0) == pytest.approx(0.1)
    message = r"start=base begins with 0\.1, .* above the peak for 32, 0\.0125: set schedule\.warmup\.start=zero, or a"
    with pytest.raises(ValueError, match=message):
        make_schedule(recipe([base, "launch.num_workers=1"]), steps_per_epoch=10)


def test_an_absolute_rate_has_no_base() -> None:
    with pytest.raises(ValueError, match=r"^config smoke: schedule\.warmup\.start=base is the rate for .* of 256"):
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


@pytest.mark.parametrize("steps_per_epoch", [1, 2, 3])
@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_very_short_runs_have_a_rate_for_every_step(steps_per_epoch: int, epochs: int) -> None:
    for decay in ("multi_step", "cosine", "polynomial", "constant"):
        config = recipe([f"schedule.decay={decay}", f"training.epochs={epochs}"])
        schedule = make_schedule(config, steps_per_epoch)
        assert all(0 < schedule(step) <= 0.1 for step in range(epochs * steps_per_epoch)), decay
