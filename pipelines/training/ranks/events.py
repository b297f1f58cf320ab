"""The events that rank 0 sends to the driver of a training, a search or a probe; each is a report of the launcher."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from pipelines.launch.rank.report import report
from pipelines.training.memory.memory import MemoryLimit, Needs


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """The first step is compiling. No other event is sent until it finishes."""


@dataclass(frozen=True, kw_only=True)
class StepTrained:
    """A step of an epoch is done."""

    epoch: int
    """Number of the epoch, from 1."""
    epochs: int
    step: int
    """Number of the step within its epoch, from 1."""
    steps: int
    """Number of steps per epoch."""
    loss: float
    images_per_second: float


@dataclass(frozen=True, kw_only=True)
class EpochTrained:
    """An epoch is trained, evaluated and recorded; its checkpoint is about to be written."""

    epoch: int
    """Number of the epoch, from 1."""
    epochs: int
    metrics: dict[str, float]
    where: str
    """A line that shows where the time of its steps went; empty if the epoch was resumed after its last step."""
    is_last: bool
    """Whether this is the last epoch."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten:
    """A checkpoint is complete: from here the run can be continued."""

    path: str
    """Path or URL of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SavingModel:
    """All epochs are done; the model is being written."""


@dataclass(frozen=True, kw_only=True)
class TrackingNews:
    """News about this process's writes to MLflow; see `pipelines.tracking.journal.delivery.OnNews`."""

    news: Literal["away", "back", "refused"]
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryNeeded:
    """The memory needs of a rank, which the driver reports if the kernel kills a rank."""

    needs: Needs
    limit: MemoryLimit | None


@dataclass(frozen=True, kw_only=True)
class RateTried:
    """A step of a range test is done."""

    step: int
    """Number of the step, from 1."""
    steps: int
    rate: float
    smoothed_loss: float


@dataclass(frozen=True, kw_only=True)
class BatchTried:
    """A search is about to try a batch."""

    batch_size: int


@dataclass(frozen=True, kw_only=True)
class PenaltyFitted:
    """A probe has fitted its head for one penalty."""

    number: int
    """Number of the penalty, from 1."""
    penalties: int
    l2: float
    exchanges: int
    """Number of sums over ranks that the fit took."""


Event = (
    Compiling
    | StepTrained
    | EpochTrained
    | CheckpointWritten
    | SavingModel
    | TrackingNews
    | MemoryNeeded
    | RateTried
    | BatchTried
    | PenaltyFitted
)
NAMES: dict[type[Event], str] = {
    Compiling: "compiling",
    StepTrained: "step",
    EpochTrained: "epoch",
    CheckpointWritten: "checkpoint",
    SavingModel: "saving",
    TrackingNews: "tracking",
    MemoryNeeded: "needs",
    RateTried: "rate",
    BatchTried: "trial",
    PenaltyFitted: "penalty",
}
"""The names of the kinds of events in reports."""
_READERS = {name: TypeAdapter[Event](kind) for kind, name in NAMES.items()}


def tell(event: Event) -> None:
    """Send this event to the driver; only rank 0 calls this."""
    report(event=NAMES[type(event)], **asdict(event))


def event_of(fields: Mapping[str, Any]) -> Event | None:
    """Return the event in a report; None if the report is from the user's own loss, metric or archive."""
    reader = _READERS.get(str(fields.get("event")))
    return None if reader is None else reader.validate_python(fields)
