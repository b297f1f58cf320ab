"""Which epochs a rank trains, and where it may stop."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from conf.load import load
from pipelines.launch.rank.report import StoppedOnRequest
from pipelines.training.checkpoint.state import TrainingState
from pipelines.training.epochs import Epochs
from pipelines.training.rank_training import EpochPlan

STEPS = 4


@pytest.fixture
def epochs_of() -> Any:
    """Makes `Epochs` of two epochs on one rank, which is asked to stop; an epoch that begins fails."""

    def begin(epoch: int, start_step: int) -> NoReturn:
        raise RuntimeError(f"an epoch began at step {start_step}")

    def make(
        *,
        recovery: object = None,
        recorder: Any = None,
        validate: object = None,
        block: Callable[[int], int] = lambda step: step,
    ) -> Epochs:
        rank: Any = SimpleNamespace(
            training=load("smoke", ["training.epochs=2"]).training,
            plan=EpochPlan(STEPS, 8, [None, None]),
            stop=SimpleNamespace(is_requested_now=lambda: True),
            recovery=recovery,
            mode=SimpleNamespace(block=block, come_together=None),
            validate=validate,
            data=SimpleNamespace(batches_of=begin),
            setup=SimpleNamespace(collective=None, model=None),
            checkpoints=SimpleNamespace(initial=None),
            trainer=None,
        )
        return Epochs(rank, recorder, measurements=None, sampler=None, tracer=None)  # type: ignore[arg-type]

    return make


def state(epochs_done: int, step: int) -> TrainingState:
    return TrainingState(epochs_done, step, 0, 8, "run", "data", [{"val/top_1": 0.5}] * epochs_done)


@pytest.mark.parametrize(
    ("step", "recovery", "every", "stops_after"),
    [
        (0, None, 1, 0),
        (0, "in memory", 1, 0),
        (4, "in memory", 1, 4),
        (5, None, 1, 5),
        # Ranks that are together at an epoch's end only decide alike, whatever step each has in memory.
        *((step, "in memory", STEPS, 4) for step in (4, 5, 7)),
    ],
)
def test_where_a_checkpoint_has_all_steps_training_stops_at_once(
    epochs_of: Any, step: int, recovery: Any, every: int, stops_after: int
) -> None:
    epochs = epochs_of(recovery=recovery, block=lambda step: step // every * every)
    with pytest.raises(StoppedOnRequest, match=f"^stopped after step {stops_after}$"):
        epochs.train(state(step // STEPS, step))


def test_what_ranks_have_in_memory_only_gets_a_step_after_which_a_checkpoint_is_written(epochs_of: Any) -> None:
    with pytest.raises(RuntimeError, match="an epoch began at step 1"):
        epochs_of(recovery="in memory").train(state(1, 5))


@pytest.mark.parametrize(("step", "drawn"), [(8, [8]), (9, [])])
def test_weights_within_an_epoch_are_not_drawn_for_that_before(epochs_of: Any, step: int, drawn: list[int]) -> None:
    steps: list[int] = []
    recorder = SimpleNamespace(draw_again=lambda history, evaluations, step: steps.append(step))
    epochs_of(recorder=recorder, validate=dict).train(state(2, step))
    assert steps == drawn
