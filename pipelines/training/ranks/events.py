"""What rank 0 tells the driver of a training, a search or a probe; each event travels as one report of the launcher."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from pipelines.launch.rank.report import report
from pipelines.training.memory.memory import MemoryLimit, Needs


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """The first step compiles; nothing else is told until it is done."""

    event: Literal["compiling"] = "compiling"


@dataclass(frozen=True, kw_only=True)
class StepTrained:
    """A step of an epoch is done."""

    epoch: int
    """Number of the epoch, from 1."""
    epochs: int
    step: int
    """Number of the step within its epoch, from 1."""
    steps: int
    """Steps of one epoch."""
    loss: float
    images_per_second: float
    event: Literal["step"] = "step"


@dataclass(frozen=True, kw_only=True)
class EpochTrained:
    """An epoch is trained, evaluated and recorded; its checkpoint is about to be written."""

    epoch: int
    """Number of the epoch, from 1."""
    epochs: int
    metrics: dict[str, float]
    where: str
    """Where the time of its steps went, as one line; empty where it was resumed after its last step."""
    is_last: bool
    """Whether no epoch follows."""
    event: Literal["epoch"] = "epoch"


@dataclass(frozen=True, kw_only=True)
class SavingModel:
    """All epochs are done; the model is being written."""

    event: Literal["saving"] = "saving"


@dataclass(frozen=True, kw_only=True)
class TrackingNews:
    """What this process's writes to MLflow meet; see `pipelines.tracking.journal.delivery.OnNews`."""

    news: Literal["away", "back", "refused"]
    reason: str
    event: Literal["tracking"] = "tracking"


@dataclass(frozen=True, kw_only=True)
class MemoryNeeded:
    """What a rank needs, for the driver to say should the kernel kill one."""

    needs: Needs
    limit: MemoryLimit | None
    event: Literal["needs"] = "needs"


@dataclass(frozen=True, kw_only=True)
class RateTried:
    """A step of a range test is done."""

    step: int
    """Number of the step, from 1."""
    steps: int
    rate: float
    smoothed_loss: float
    event: Literal["rate"] = "rate"


@dataclass(frozen=True, kw_only=True)
class BatchTried:
    """A search is about to try a batch."""

    batch_size: int
    event: Literal["trial"] = "trial"


@dataclass(frozen=True, kw_only=True)
class PenaltyFitted:
    """A probe has fitted its head for one penalty."""

    number: int
    """Number of the penalty, from 1."""
    penalties: int
    l2: float
    exchanges: int
    """Sums over ranks that it took."""
    event: Literal["penalty"] = "penalty"


Event = (
    Compiling
    | StepTrained
    | EpochTrained
    | SavingModel
    | TrackingNews
    | MemoryNeeded
    | RateTried
    | BatchTried
    | PenaltyFitted
)
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])
_NAMES = frozenset(kind.event for kind in Event.__args__)


def tell(event: Event) -> None:
    """Tell the driver of this event; from rank 0."""
    report(**asdict(event))


def event_of(fields: Mapping[str, Any]) -> Event | None:
    """Return the event that a report holds; None where it is a report of the user's own loss, metric or archive."""
    return _EVENTS.validate_python(fields) if str(fields.get("event")) in _NAMES else None
