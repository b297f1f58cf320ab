"""The messages between a rank's process, its task and the driver."""

from dataclasses import dataclass
from typing import Any, get_args

from pipelines.launch.wire.encoding import MAXIMUM_MESSAGE_BYTES, MessageKinds

JsonObject = dict[str, Any]
"""The report of a user's function: keyword arguments that `json` can write."""

MAXIMUM_REPORT_BYTES = MAXIMUM_MESSAGE_BYTES - (1 << 12)
"""Bytes of the longest report, without the number that its task adds: 4 MiB."""
RESULT_PART_BYTES = 1 << 20
"""Bytes of the largest part of a return value."""


@dataclass(frozen=True)
class FunctionStarted:
    """Rank to driver: the process has read its function and calls it now."""


@dataclass(frozen=True)
class StepDone:
    """Rank to driver: only a sign of life."""


@dataclass(frozen=True)
class Report:
    """Rank to driver: the fields that the function passed to `report`."""

    fields: JsonObject


@dataclass(frozen=True)
class ShownLine:
    """Rank to driver: the line that the function passed to `log_to_driver`."""

    line: str


@dataclass(frozen=True)
class ReadyToJoin:
    """Rank to driver: the rank waits until all are ready to join."""

    progress: int
    """Progress of the function, in any unit; the value rises with progress."""
    joins: int = 0
    """Number of earlier orders to join that this rank's processes received; its task counts them."""


@dataclass(frozen=True)
class FunctionReturned:
    """Rank to task: the function has returned, and its value is written if the driver wants it."""


@dataclass(frozen=True)
class FunctionFailure:
    """Rank to task, and to the driver inside `ProcessExit`: the exception that the function raised."""

    error: str
    """Name of the exception's class."""
    message: str
    traceback: str
    on_request: bool = False
    """Whether the exception is `StoppedOnRequest`."""


@dataclass(frozen=True)
class Hello:
    """Task to driver, first: the location of the task and its resources."""

    task: int
    host: str
    probe_port: int | None
    """A port that accepts connections while the task lives; None if the task could not open one."""
    devices: str
    """The task's `CUDA_VISIBLE_DEVICES`."""
    complaint: str
    """The reason why the rank cannot run; empty if there is none."""
    hostname: str
    resolves_to: str
    """The address of the host's own name, or the reason why there is none."""
    shared_memory_mib: int
    """Size of the host's /dev/shm."""
    versions: dict[str, str]


@dataclass(frozen=True)
class Opening:
    """Task to driver, first on each connection: the identity of the task."""

    link: str
    """Random name of the task's attempt: Spark may start a task twice."""
    hello: Hello
    orders: int = 0
    """Number of the driver's orders received over earlier connections."""


@dataclass(frozen=True)
class LogPart:
    """Task to driver: a part of the rank's output, from byte `offset` to byte `end`."""

    offset: int
    end: int
    lines: list[str]


@dataclass(frozen=True)
class ResultPart:
    """Task to driver: a part of the rank's pickled return value, which is the data of the frame."""

    offset: int


@dataclass(frozen=True)
class Stacks:
    """Task to driver: the stacks of all Python threads of the rank."""

    text: str


@dataclass(frozen=True)
class SigtermReceived:
    """Task to driver: the task's process has received SIGTERM."""


@dataclass(frozen=True)
class MessagesDropped:
    """Task to driver: number of messages that are lost because they did not fit the task's memory."""

    count: int


@dataclass(frozen=True)
class ProcessDied:
    """Task to driver: the rank's process has died, and its spare takes its place."""

    death: str
    """The exit code or signal in words."""
    exit_code: int
    faults: str
    """Stacks that the process wrote when it crashed."""
    last_lines: list[str]


@dataclass(frozen=True)
class ProcessExit:
    """Task to driver, last: how the rank's process ended."""

    stopped: bool
    """Whether the task ended the process on the driver's order."""
    finished: bool
    """Whether the function had returned."""
    exit_code: int
    death: str
    """The exit code or signal in words."""
    faults: str
    """Stacks that the process wrote when it crashed."""
    failure: FunctionFailure | None
    last_lines: list[str]


@dataclass(frozen=True)
class Heartbeat:
    """Task to driver: a sign of life after two seconds without another message."""


@dataclass(frozen=True)
class Receipt:
    """Driver to task: the data that has arrived, so that the task can delete it."""

    number: int
    """Number of the last message."""
    log_bytes: int
    result_bytes: int


@dataclass(frozen=True)
class Welcome(Receipt):
    """Driver to task, first on each connection: the data that earlier connections delivered."""


@dataclass(frozen=True)
class RunRank:
    """Driver to task: run the function as this rank."""

    rank: int
    environment: dict[str, str]
    wants_result: bool


@dataclass(frozen=True)
class Join:
    """Driver to task, and task to rank: all ranks are ready; join the others with these variables."""

    environment: dict[str, str]


@dataclass(frozen=True)
class TakeOver:
    """Task to spare process: the rank's process has died; this one is the rank now."""


@dataclass(frozen=True)
class SendStacks:
    """Driver to task: the rank may hang; send its stacks."""


@dataclass(frozen=True)
class EndProcess:
    """Driver to task: the rank's process hangs; end it, so that its spare takes its place."""


@dataclass(frozen=True)
class StopSoon:
    """Driver to task: ask the rank to stop, with SIGTERM."""


@dataclass(frozen=True)
class Stop:
    """Driver to task: end the rank's process now."""


@dataclass(frozen=True)
class Disconnected:
    """An event inside the driver: a task's connection has ended."""


@dataclass(frozen=True)
class Reconnected:
    """An event inside the driver: a task has connected again."""


@dataclass(frozen=True)
class TaskRestarted:
    """An event inside the driver: Spark has started a task a second time."""


SignOfLife = FunctionStarted | StepDone | Report | ShownLine
"""Messages that show progress of the function."""
RankMessage = SignOfLife | ReadyToJoin | FunctionReturned | FunctionFailure
NumberedMessage = SignOfLife | ReadyToJoin | Stacks | SigtermReceived | MessagesDropped | ProcessDied | ProcessExit
"""Messages that a link stores until the driver has received them."""
Order = RunRank | Join | SendStacks | EndProcess | StopSoon | Stop
RankOrder = Join | TakeOver
"""Orders from a task to its rank's process."""
Event = Hello | NumberedMessage | LogPart | Disconnected | Reconnected | TaskRestarted
"""Events in the driver's queue."""
Message = (
    RankMessage
    | (NumberedMessage | Hello | Opening | LogPart | ResultPart | Heartbeat)
    | (RankOrder | Order | Welcome | Receipt)
)

_KINDS = MessageKinds[Message](*get_args(Message))


def decode(data: bytes) -> tuple[Message, int]:
    """Return a message and its number, which is the position of a `NumberedMessage` or of an order of its task.

    Raises:
        ValueError: The data is not a message of the launcher.
    """
    return _KINDS.decode(data)
