"""What the driver concludes from what it hears, with tasks that only the test has."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.launch.driver import probes
from pipelines.launch.driver.failure import Outcome, RankLostError, WorkerError
from pipelines.launch.driver.joining import JoinRounds
from pipelines.launch.driver.rank_output import RankOutput
from pipelines.launch.driver.supervisor import Supervisor
from pipelines.launch.policy import TimeLimits
from pipelines.launch.wire.messages import (
    Disconnected,
    EndProcess,
    Event,
    FunctionFailure,
    FunctionStarted,
    Hello,
    Join,
    JsonObject,
    Order,
    ProcessDied,
    ProcessExit,
    ReadyToJoin,
    Report,
    RunRank,
    SendStacks,
    SigtermReceived,
    Stacks,
    StepDone,
    Stop,
    StopSoon,
)
from tests.patience import patient, wait_until

pytestmark = pytest.mark.timeout(120)

IN_HOROVOD = 'Current thread 0x1 (most recent call first):\n  File "/site-packages/horovod/mpi_ops.py", line 1 in wait'
IN_FUNCTION = 'Current thread 0x1 (most recent call first):\n  File "/home/train.py", line 1 in load'
FINISHED = ProcessExit(False, True, 0, "exited with code 0", "", None, [])
STOPPED = ProcessExit(True, False, -9, "stopped", "", None, [])
KILLED = ProcessExit(False, False, -9, "killed by SIGKILL", "", None, [])
FALLEN = ProcessDied("killed by SIGKILL", -9, "", [])
LIMITS = TimeLimits(start=patient(60), hang=None, stop_grace=patient(60))
SHORT_LIMITS = TimeLimits(start=patient(1), hang=patient(1), stop_grace=patient(60))
"""Ranks may let the others wait for a second."""
HANG_LIMITS = TimeLimits(start=patient(60), hang=0.5, stop_grace=patient(60))
"""A rank without a sign of life hangs soon."""
DIED = [Outcome(rank, f"h{rank}", "died", "killed by SIGKILL") for rank in range(2)]


def raised(error: str, message: str, *, on_request: bool = False) -> ProcessExit:
    return ProcessExit(False, False, 1, "exited with code 1", "", FunctionFailure(error, message, "", on_request), [])


class FakeChannel:
    """Hears what the test puts into `events`; `answers` are put there when a task gets an order of that kind."""

    def __init__(
        self,
        size: int,
        answers: dict[tuple[int, type[Order]], list[Event]] | None = None,
        *,
        silent: float = 0.0,
        port: int | None = 1,
    ) -> None:
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self.sent: list[tuple[int, Order]] = []
        self.size = size
        self.answers = answers or {}
        self.silent = silent
        self.hear(*((task, Hello(task, f"h{task}", port, "-1", "", "node", f"h{task}", 0, {})) for task in range(size)))

    def hear(self, *events: tuple[int, Event]) -> None:
        for event in events:
            self.events.put(event)

    def send(self, task: int, order: Order) -> None:
        self.sent.append((task, order))
        self.hear(*((task, event) for event in self.answers.get((task, type(order)), [])))

    def has_sent(self, task: int, order: Order) -> bool:
        return (task, order) in self.sent

    def seconds_silent(self, task: int) -> float:
        return self.silent


def supervise(
    channel: FakeChannel,
    limits: TimeLimits = LIMITS,
    on_report: Callable[[JsonObject], None] = lambda report: None,
    *,
    heard: Iterable[tuple[int, Event]] = (),
    stop_reason: str | None = None,
    have_finished: bool = False,
) -> Supervisor:
    """A supervisor of ranks that have begun, and what is heard then.

    Args:
        channel: What it hears.
        limits: How long it waits.
        on_report: Gets the reports of ranks.
        heard: Events after the start of all ranks.
        stop_reason: Why Spark's tasks are to stop.
        have_finished: Whether Spark's tasks have ended.
    """
    tasks: Any = SimpleNamespace(failure=lambda: None, stop_reason=lambda: stop_reason, finished=lambda: have_finished)
    output = RankOutput("none", lambda rank, line: None, on_report, None)
    joining = JoinRounds(channel.size, lambda: {"RENDEZVOUS": "new"})
    supervisor = Supervisor(channel, tasks, channel.size, output, limits, joining)
    supervisor.gather()
    supervisor.go([RunRank(task, {}, wants_result=True) for task in range(channel.size)])
    channel.hear(*((task, FunctionStarted()) for task in range(channel.size)), *heard)
    return supervisor


def error_of(
    supervisor: Supervisor, message: str, error: type[WorkerError | RankLostError] = RankLostError
) -> WorkerError | RankLostError:
    """The error with which an attempt ends, whose text has this message."""
    with pytest.raises(error, match=message) as caught:
        supervisor.watch()
    return caught.value


def reports_until(channel: FakeChannel, enough: Callable[[int], bool]) -> threading.Thread:
    """A thread in which rank 0 reports faster than it is heard, and finishes when there are enough."""

    def flood() -> None:
        for number in itertools.takewhile(lambda number: not enough(number), itertools.count()):
            channel.hear((0, Report({"number": number})))
            time.sleep(0.002)
        channel.hear((0, FINISHED))

    thread = threading.Thread(target=flood)
    thread.start()
    return thread


@pytest.mark.parametrize("end", [FINISHED, Disconnected()])
def test_reports_that_arrive_after_the_results_are_heard(end: Event) -> None:
    heard: list[JsonObject] = []
    channel = FakeChannel(1)
    supervisor = supervise(channel, on_report=heard.append, have_finished=True)
    threading.Timer(0.5, channel.hear, [(0, Report({"number": 1}))]).start()
    threading.Timer(1.0, channel.hear, [(0, Report({"number": 2})), (0, end)]).start()
    supervisor.watch()
    assert [report["number"] for report in heard] == [1, 2]


@pytest.mark.parametrize(
    "heard",
    [
        [(1, FALLEN), (1, FunctionStarted()), (1, ReadyToJoin(4, joins=1)), (0, FINISHED)],
        [(0, FINISHED), (1, FALLEN), (1, FunctionStarted())],
    ],
)
def test_a_spare_does_not_take_over_where_another_rank_finishes(heard: list[tuple[int, Event]]) -> None:
    channel = FakeChannel(2, {(1, Stop): [ProcessExit(False, True, 137, "stopped", "", None, [])]})
    supervisor = supervise(channel, SHORT_LIMITS, heard=[(0, ReadyToJoin(0)), (1, ReadyToJoin(0)), *heard])
    error_of(supervisor, "rank 1 on h1 failed: killed by SIGKILL")


def test_a_spare_that_takes_the_order_to_join_of_its_dead_rank_lets_nobody_wait() -> None:
    """The rank has died while the order was on its way: its spare takes that order, and all train on."""
    channel = FakeChannel(2)
    heard = [
        *((task, ReadyToJoin(0)) for task in range(2)),
        *((0, FALLEN), (1, ReadyToJoin(4, joins=1)), (0, ReadyToJoin(4, joins=1))),  # all join again
        *((1, FALLEN), (1, ReadyToJoin(4, joins=1))),  # before that order has come
    ]
    supervisor = supervise(channel, TimeLimits(start=patient(1), hang=None, stop_grace=patient(60)), heard=heard)
    # Later than a rank may let the others wait.
    threading.Timer(patient(2), channel.hear, [(task, FINISHED) for task in range(2)]).start()
    supervisor.watch()
    assert [order for _, order in channel.sent if isinstance(order, Join)] == [Join({"RENDEZVOUS": "new"})] * 4


SHUT_DOWN = raised("UnknownError", "Horovod has been shut down.")
EARLY = "rank 1 returned while rank 0 was in a collective operation: all ranks need equal numbers of steps"
JOINED = [(task, ReadyToJoin(0)) for task in range(3)]
ABORTED = ProcessExit(False, True, -6, "killed by SIGABRT", "", None, ["what(): [gloo/transport/tcp/pair.cc"])


@pytest.mark.parametrize(
    ("heard", "error", "text"),
    [
        ([(1, FINISHED), (0, SHUT_DOWN)], WorkerError, EARLY),
        ([(0, SHUT_DOWN), (1, FINISHED)], WorkerError, EARLY),
        ([(1, SigtermReceived()), (1, FINISHED), (0, SHUT_DOWN)], RankLostError, "rank 0 on h0 failed: UnknownError"),
        ([(1, FINISHED), (0, ABORTED)], RankLostError, "rank 0 on h0 failed: killed by SIGABRT after the function"),
        ([(1, FINISHED), (2, Disconnected()), (0, SHUT_DOWN)], RankLostError, "rank 0 on h0 failed: UnknownError"),
        # Horovod may turn the death of a peer into an exception whose text nobody knows.
        ([*JOINED, (1, FALLEN), (0, raised("OSError", "unknown"))], RankLostError, "rank 1 on h1 failed: killed by"),
        ([*JOINED, (1, FALLEN), (0, SHUT_DOWN)], RankLostError, "rank 1 on h1 failed: killed by SIGKILL"),
    ],
)
def test_the_cause_is_a_rank_that_returned_early_unless_there_may_be_another(
    monkeypatch: pytest.MonkeyPatch,
    heard: list[tuple[int, Event]],
    error: type[WorkerError | RankLostError],
    text: str,
) -> None:
    monkeypatch.setattr("pipelines.launch.driver.supervisor._CAUSE_SECONDS", 0.1)
    monkeypatch.setattr(probes, "answers", lambda host, port: True)
    channel = FakeChannel(3, {(2, Stop): [] if (2, Disconnected()) in heard else [STOPPED]})
    error_of(supervise(channel, heard=heard), text, error)


@pytest.mark.parametrize(
    "heard", [[(1, ReadyToJoin(0)), (0, FINISHED)], [(0, FINISHED), (1, ReadyToJoin(0))]], ids=["waits first", "later"]
)
def test_a_rank_does_not_wait_to_join_one_that_has_finished(heard: list[tuple[int, Event]]) -> None:
    supervisor = supervise(FakeChannel(2), SHORT_LIMITS, heard=heard)
    error_of(supervisor, "rank 1 on h1 failed: hung: it waits to join rank 0, whose function has")


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_survivor_that_does_not_join_again_is_replaced_once_else_its_stacks_are_shown(is_replaced: bool) -> None:
    channel = FakeChannel(2, {(0, SendStacks): [Stacks(IN_HOROVOD)]})
    supervisor = supervise(
        channel,
        TimeLimits(start=patient(2), hang=None, stop_grace=patient(60)),
        heard=[(0, ReadyToJoin(0)), (1, ReadyToJoin(0)), (1, FALLEN), (1, ReadyToJoin(4, joins=1))],
    )

    def replace() -> None:
        wait_until(lambda: channel.has_sent(0, EndProcess()))
        channel.hear((0, FALLEN), (0, ReadyToJoin(4, joins=1)), (0, FINISHED), (1, FINISHED))

    if is_replaced:
        threading.Thread(target=replace, daemon=True).start()
        supervisor.watch()
    else:
        error = error_of(supervisor, "rank 1 on h1 failed: killed")
        assert f"Stacks of rank 0:\n{IN_HOROVOD}" in str(error)
    assert channel.sent.count((0, EndProcess())) == 1


def test_ranks_are_asked_to_stop_while_reports_come_faster_than_they_are_handled() -> None:
    channel, heard = FakeChannel(1), list[int]()
    until = time.monotonic() + patient(20)  # else it would go on for ever

    def slow(report: JsonObject) -> None:
        time.sleep(0.02)
        heard.append(report["number"])

    supervisor = supervise(channel, on_report=slow)
    supervisor.request_stop("the driver received SIGTERM")
    flood = reports_until(channel, lambda number: channel.has_sent(0, StopSoon()) or time.monotonic() > until)
    supervisor.watch()
    flood.join()
    assert channel.has_sent(0, StopSoon())
    assert time.monotonic() < until
    assert heard == list(range(len(heard))), "none is lost"


@pytest.mark.long
def test_a_rank_that_dies_ends_the_run_while_another_reports_faster_than_it_is_heard() -> None:
    channel = FakeChannel(2, {(0, Stop): [STOPPED]})
    supervisor = supervise(channel, on_report=lambda report: time.sleep(0.02))
    until = time.monotonic() + patient(60)
    threading.Timer(0.1, channel.hear, [(1, KILLED)]).start()
    flood = reports_until(channel, lambda number: channel.has_sent(0, Stop()) or time.monotonic() > until)
    error_of(supervisor, "rank 1 on h1 failed: killed by SIGKILL")
    flood.join()
    assert time.monotonic() < until, "it would go on for a minute"


@pytest.mark.parametrize("port", [None, 1])
def test_a_task_that_the_driver_never_reached_is_not_lost_when_it_falls_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: int | None
) -> None:
    """A firewall may let tasks reach the driver and not the driver reach them."""
    asked: list[str] = []
    monkeypatch.setattr(probes, "answers", lambda host, port: asked.append(host))
    channel = FakeChannel(1, port=port)
    supervisor = supervise(channel)
    supervisor._members.by_task[0].first_probe.result()  # type: ignore[union-attr]
    monkeypatch.setattr(probes, "SILENT_SECONDS", 0.0)
    channel.silent = 99.0
    threading.Timer(1, channel.hear, [(0, FINISHED)]).start()
    supervisor.watch()
    assert asked == (["h0"] if port else [])
    assert supervisor.unreachable_hosts == set(asked)
    assert ("the driver cannot connect to h0, whose task has connected" in caplog.text) == bool(port)


def test_lost_hosts_are_asked_at_once_while_messages_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    size, calls, reported = 16, itertools.count(), threading.Event()
    all_asked = threading.Barrier(size, action=lambda: channel.hear((0, Report({"still": "heard"}))))

    def answers(host: str, port: int) -> bool:
        if next(calls) < size:  # when all have just connected
            return True
        all_asked.wait(patient(50))  # breaks where one is asked after the other
        assert reported.wait(patient(50)), "no message was handled while the hosts were asked"
        return False

    monkeypatch.setattr(probes, "answers", answers)
    monkeypatch.setattr(probes, "SILENT_SECONDS", 0.0)
    channel = FakeChannel(size, silent=99.0)
    supervisor = supervise(channel, on_report=lambda report: reported.set())
    error = error_of(supervisor, "lost: neither its Spark task nor its host answers")
    assert [outcome.kind for outcome in error.outcomes] == ["lost"] * size


def test_a_silent_task_whose_host_answers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answers(host: str, port: int) -> bool:
        asked.append(host)
        channel.hear((0, FINISHED))
        return True

    monkeypatch.setattr(probes, "answers", answers)
    monkeypatch.setattr(probes, "SILENT_SECONDS", 0.0)
    channel = FakeChannel(1, silent=99.0)
    supervise(channel).watch()
    assert asked[0] == "h0"


def test_a_sign_of_life_on_its_way_while_stacks_are_collected_acquits() -> None:
    channel = FakeChannel(2, {(task, SendStacks): [StepDone(), Stacks(IN_FUNCTION), FINISHED] for task in range(2)})
    supervise(channel, HANG_LIMITS).watch()
    assert channel.has_sent(0, SendStacks())


def test_the_rank_that_the_others_wait_for_hangs() -> None:
    channel = FakeChannel(
        3,
        {
            (0, SendStacks): [Stacks(IN_HOROVOD)],
            (1, SendStacks): [Stacks(IN_FUNCTION)],
            (0, Stop): [STOPPED],
        },
    )
    supervisor = supervise(channel, HANG_LIMITS, heard=[(2, FINISHED)])
    error = error_of(supervisor, r"rank 1 .* hung: no sign of life .*; rank 2 has returned")
    assert error.root.traceback == IN_FUNCTION


@pytest.mark.long
@pytest.mark.parametrize("at", range(20, 30))
def test_time_in_which_the_driver_itself_stood_still_is_nobodys_hang(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """As after SIGSTOP and SIGCONT, at any place in the loop."""
    channel = FakeChannel(1, {(0, SendStacks): [Stacks(IN_FUNCTION)]})
    supervisor = supervise(channel, TimeLimits(start=patient(60), hang=patient(30), stop_grace=patient(60)))
    clock, looks = time.monotonic, itertools.count(1)

    def stopped_and_continued() -> float:
        look = next(looks)
        if look == at + 30:
            channel.hear((0, FINISHED))
        return clock() + (3600.0 if look > at else 0.0)

    monkeypatch.setattr(time, "monotonic", stopped_and_continued)
    supervisor.watch()
    assert next(looks) > at + 30  # it stood still, and rank 0 finished after that


def test_a_request_reaches_all_and_waits_for_the_last(caplog: pytest.LogCaptureFixture) -> None:
    saved = raised("StoppedOnRequest", "step 7 is saved", on_request=True)
    channel = FakeChannel(2, {(0, StopSoon): [saved]})
    supervisor = supervise(channel, heard=[(1, SigtermReceived())])
    threading.Timer(2.5, channel.hear, [(1, saved)]).start()
    error = error_of(supervisor, "stopped on request: step 7 is saved")
    assert [outcome.kind for outcome in error.outcomes] == ["requested"] * 2
    assert [task for task, order in channel.sent if order == StopSoon()] == [0, 1]
    within = f"all ranks are asked to stop within {patient(60):g} s"
    assert f"the task of rank 1 on h1 received SIGTERM: {within}" in caplog.text


def test_a_rank_that_outlasts_the_grace_is_named() -> None:
    limits = TimeLimits(start=patient(60), hang=None, stop_grace=0.2)
    supervisor = supervise(FakeChannel(2), limits, heard=[(1, FINISHED)])
    supervisor.request_stop("the driver received SIGTERM")
    error_of(
        supervisor, r"rank 0 on h0 failed: still ran 0\.2 s after it was asked to stop \(the driver received SIGTERM\)"
    )


def test_an_executor_that_spark_takes_away_stops_all_ranks() -> None:
    stopped = raised("StoppedOnRequest", "", on_request=True)
    channel = FakeChannel(2, {(task, StopSoon): [stopped] for task in range(2)})
    supervisor = supervise(channel, stop_reason="Spark decommissions executor 3")
    error_of(supervisor, "rank 0 on h0 failed: stopped on request")


def test_spares_that_die_before_they_join_count_each_time() -> None:
    """A rank that dies before all have joined once ends the attempt: the others would wait for ever for one in it."""
    first, joining = JoinRounds(2, dict), JoinRounds(2, dict)
    first.take(0, 0, 0)
    assert not first.is_replaced(1, DIED[1])
    for task in range(2):
        joining.take(task, 0, 0)
    assert [joining.is_replaced(rank, DIED[rank]) for rank in range(2)] == [True, True], "both at once count once"
    assert [joining.is_replaced(0, DIED[0]) for _ in range(3)] == [True, True, False]


def test_a_rank_that_was_stopped_within_the_grace_has_not_outlasted_it() -> None:
    full = raised("OSError", "No space left on device")
    channel = FakeChannel(2, {(1, StopSoon): [full], (0, Stop): [STOPPED]})
    supervisor = supervise(channel, heard=[(1, SigtermReceived())])
    error = error_of(supervisor, "rank 1 on h1 failed: OSError: No space left on device", WorkerError)
    assert [outcome.kind for outcome in error.outcomes] == ["stopped", "exception"]
