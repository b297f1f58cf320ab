"""Processes of ranks are killed; spares take over, and the run ends as one that was never disturbed, bit for bit."""

import random
import re
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.parallel.trainings import Disturbed, Trained, Undisturbed, assert_equal
from tests.patience import patient

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(900)]

KILLS, STEPS, IN_PLACE = 4, 15, "launch.recover=in_place"


def assert_recovered(found: Trained, expected: Trained) -> None:
    """The training has lost no bit, and took one attempt."""
    assert_equal(found, expected)
    assert MlflowClient(found.store).get_run(found.run.run.run_id).data.tags["attempt"] == "1"


def test_kills_at_random_moments_cost_no_bit_and_no_attempt(undisturbed: Undisturbed, disturbed: Disturbed) -> None:
    """Also what a codec left behind, and the curves of the steps."""
    random_ = random.Random(KILLS)
    # Apart from each other, so that a process lives until its own death.
    steps = random_.sample(range(6, STEPS - 1, 2), KILLS - 1)
    deaths: list[Any] = [(random_.randrange(2), step, random_.choice([0.0, 0.02, 0.05])) for step in steps]
    deaths.append((0, 3, -1.0))
    found = disturbed("codec", deaths, IN_PLACE)
    assert_recovered(found, undisturbed("codec"))
    assert len(re.findall(r"takes the place of one that has died", found.log(0) + found.log(1))) == KILLS
    tags = MlflowClient(found.store).get_run(found.run.run.run_id).data.tags
    assert sorted(value for name, value in tags.items() if name.startswith("recovered_after_step_")) == sorted(
        f"rank {rank}" for rank, *_ in deaths
    )


@pytest.mark.parametrize(
    ("name", "deaths"),
    [
        ("local", [(1, 6), (0, 11, 0.03), (1, 13)]),
        ("delayed", [(1, 6), (0, 11, 0.03), (1, 13)]),
        ("regularised", [(1, 5), (0, 8, 0.03), (1, 10)]),
        ("accumulated", [(1, 6), (0, 11, 0.03), (1, 13)]),
    ],
)
def test_ranks_continue_in_place_in_every_mode(
    undisturbed: Undisturbed, disturbed: Disturbed, name: str, deaths: list[Any]
) -> None:
    """One dies alone between two exchanges, one in an exchange; in one mode the gradients have 2.8 MB.

    Each spare has taken a step of its own, of which nothing is left.
    """
    found = disturbed(name, deaths, IN_PLACE, waits=True)
    # A spare alone gets all means, where the graph of a sharded optimizer takes the part of one of two ranks.
    taken = "took a part of a step ahead" if name == "regularised" else "took a step ahead ("
    for rank, count in enumerate((1, 2)):
        assert found.log(rank).count(taken) >= count
    assert_recovered(found, undisturbed(name))


@pytest.mark.parametrize(
    ("name", "deaths", "more", "waits"),
    [
        # One dies in the first step behind a border, while the other one trains on alone until the next border.
        ("local", [(1, 0), (1, 5)], [], True),
        # Horovod may leave a survivor hanging; its spare takes over after half of the time that a start may take.
        ("local", [(1, 6), (0, 6, 0.0, True)], [f"launch.start_timeout_seconds={round(patient(60))}"], False),
        # Sums of micro-batches are forgotten, averages of weights are kept; several steps may be taken again.
        ("accumulated", [(1, 4), (0, 5, 0.05)], ["launch.recover_every_steps=3"], False),
    ],
    ids=["at a border", "a survivor hangs", "some steps again"],
)
def test_a_recovery_costs_no_bit(
    undisturbed: Undisturbed, disturbed: Disturbed, name: str, deaths: list[Any], more: list[str], waits: bool
) -> None:
    assert_recovered(disturbed(name, deaths, IN_PLACE, *more, waits=waits), undisturbed(name))
