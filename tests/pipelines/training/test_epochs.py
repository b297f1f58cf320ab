"""Which epochs a rank trains, and where it may stop."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from conf.load import load
from pipelines.launch.report import StoppedOnRequest
from pipelines.training.checkpoint import TrainingState
from pipelines.training.epochs import Epochs, Place

STEPS = 4


class BeganError(Exception):
    """An epoch was begun."""


@pytest.fixture
def epochs_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `Epochs` of two epochs on one rank, which is asked to stop."""

    def begin(self: Epochs, place: Place, history: Any, began: float) -> float:
        raise BeganError(place.start_step)

    monkeypatch.setattr(Epochs, "_train_one", begin)

    def make(
        *,
        recovery: object = None,
        record: object = None,
        validate: object = None,
        block: Callable[[int], int] = lambda step: step,
    ) -> Epochs:
        rank: Any = SimpleNamespace(
            config=load("smoke", ["training.epochs=2"]),
            steps=STEPS,
            stop=SimpleNamespace(is_requested_now=lambda: True),
            recovery=recovery,
            mode=SimpleNamespace(block=block),
            validate=validate,
        )
        made: Any = record
        return Epochs(rank, made, measurements=None, sampler=None, tracer=None)  # type: ignore[arg-type]

    return make


def state(epochs_done: int, step: int) -> TrainingState:
    return TrainingState(epochs_done, step, 0, 8, "run", "data", [{"val/top_1": 0.5}] * epochs_done)


@pytest.mark.parametrize(("step", "recovery"), [(0, None), (0, "kept"), (4, "kept"), (5, None)])
def test_where_a_checkpoint_has_all_steps_training_stops_at_once(epochs_of: Any, step: int, recovery: Any) -> None:
    with pytest.raises(StoppedOnRequest, match=f"^stopped after step {step}$"):
        epochs_of(recovery=recovery).train(state(step // STEPS, step))


def test_what_ranks_keep_in_memory_only_gets_a_step_after_which_a_checkpoint_is_written(epochs_of: Any) -> None:
    with pytest.raises(BeganError, match="1"):
        epochs_of(recovery="kept").train(state(1, 5))


def test_ranks_that_are_together_at_an_epochs_end_only_decide_alike_whatever_step_each_has_kept(epochs_of: Any) -> None:
    for step in (4, 5, 7):
        with pytest.raises(StoppedOnRequest, match=r"^stopped after step 4$"):
            epochs_of(recovery="kept", block=lambda step: step // STEPS * STEPS).train(state(1, step))


@pytest.mark.parametrize(("step", "drawn"), [(8, [8]), (9, [])])
def test_weights_within_an_epoch_are_not_drawn_for_that_before(epochs_of: Any, step: int, drawn: list[int]) -> None:
    steps: list[int] = []
    record = SimpleNamespace(draw_again=lambda history, evaluations, step: steps.append(step))
    epochs_of(record=record, validate=dict).train(state(2, step))
    assert steps == drawn
