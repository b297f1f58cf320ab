"""What rank 0 tells the driver arrives as it was, through the launcher's JSON."""

import json
import math
from dataclasses import asdict

import pytest
from pydantic import ValidationError

from pipelines.training.memory.memory import MemoryLimit, Needs
from pipelines.training.ranks import events

NEEDS = Needs(weights=1, gradients=2, optimizer=3, exchange=4, sample=5)


@pytest.mark.parametrize(
    "event",
    [
        events.Compiling(),
        events.StepTrained(epoch=1, epochs=2, step=3, steps=4, loss=0.5, images_per_second=6.0),
        events.StepTrained(epoch=1, epochs=1, step=1, steps=1, loss=math.nan, images_per_second=1.0),
        events.EpochTrained(epoch=1, epochs=2, metrics={"train/loss": 0.5}, where="here", is_last=True),
        events.CheckpointWritten(path="/out/checkpoints/step-00000004.npz"),
        events.SavingModel(),
        events.TrackingNews(news="away", reason="no answer"),
        events.MemoryNeeded(needs=NEEDS, limit=MemoryLimit(7, "the host's memory")),
        events.MemoryNeeded(needs=NEEDS, limit=None),
        events.RateTried(step=1, steps=2, rate=0.1, smoothed_loss=0.5),
        events.BatchTried(batch_size=8),
        events.PenaltyFitted(number=1, penalties=2, l2=1e-3, exchanges=40),
    ],
)
def test_an_event_arrives_as_it_was_told(event: events.Event) -> None:
    # The launcher adds the rank. As text, because nan is not equal to itself.
    report = {"event": events.NAMES[type(event)], **asdict(event), "rank": 0}
    assert repr(events.event_of(json.loads(json.dumps(report)))) == repr(event)


@pytest.mark.parametrize("fields", [{}, {"event": "another"}, {"event": ["step"]}, {"steps": 1}])
def test_reports_of_the_users_own_parts_are_no_events(fields: dict[str, object]) -> None:
    assert events.event_of(fields) is None


def test_an_event_with_other_fields_is_an_error_and_not_ignored() -> None:
    with pytest.raises(ValidationError, match="epochs"):
        events.event_of({"event": "step", "epoch": 1})
