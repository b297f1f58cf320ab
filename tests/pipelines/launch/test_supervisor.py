"""What the driver concludes from what it hears, with tasks that only the test has."""

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import cast

import pytest

from pipelines.launch import supervisor as module
from pipelines.launch.channel import DriverChannel
from pipelines.launch.failure import Outcome, RankLostError, WorkerError
from pipelines.launch.joining import Joining
from pipelines.launch.listener import Listener
from pipelines.launch.members import Limits
from pipelines.launch.messages import (
    Begun,
    Event,
    Exit,
    Failure,
    Fallen,
    Go,
    Gone,
    Hello,
    Join,
    JsonObject,
    Order,
    Ready,
    Report,
    SendStacks,
    Stacks,
    StepDone,
    Stop,
    StopAsked,
    StopSoon,
)
from pipelines.launch.supervisor import Supervisor
from tests.patience import patient

pytestmark = pytest.mark.timeout(120)

IN_HOROVOD = 'Current thread 0x1 (most recent call first):\n  File "/site-packages/horovod/mpi_ops.py", line 1 in wait'
IN_FUNCTION = 'Current thread 0x1 (most recent call first):\n  File "/home/train.py", line 1 in load'
FINISHED = Exit(False, True, 0, "exited with code 0", "", None, [])


class FakeChannel:
    """Hears what the test puts into `events`; `answer` may put more when an order is sent."""

    def __init__(self, size: int, silent: float = 0.0) -> None:
        self.events: queue.Queue[tuple[int, Event]] = queue.Queue()
        self.sent: list[tuple[int, Order]] = []
        self.answer: Callable[[int, Order], None] = lambda task, order: None
        self._silent = silent
        for task in range(size):
            self.events.put((task, Hello(task, f"h{task}", 1, "-1", "", "node", f"h{task}", 0, {})))

    def send(self, task: int, order: Order) -> None:
        self.sent.append((task, order))
        self.answer(task, order)

    def seconds_silent(self, task: int) -> float:
        return self._silent


class FakeTasks:
    def __init__(self, stop_reason: str | None = None) -> None:
        self._stop_reason = stop_reason

    def failure(self) -> str | None:
        return None

    def stop_reason(self) -> str | None:
        return self._stop_reason

    def finished(self) -> bool:
        return False


def supervise(
    channel: FakeChannel,
    size: int,
    limits: Limits = Limits(start=patient(60), hang=None, stop_grace=patient(60)),  # noqa: B008  immutable
    on_report: Callable[[JsonObject], None] = lambda report: None,
    tasks: FakeTasks | None = None,
) -> Supervisor:
    """A supervisor whose ranks have begun."""
    listener = Listener("none", lambda rank, line: None, on_report, None)
    joining = Joining(size, lambda: {"RENDEZVOUS": "new"})
    supervisor = Supervisor(cast(DriverChannel, channel), tasks or FakeTasks(), size, listener, limits, joining)
    supervisor.gather()
    supervisor.go([Go(task, {}, wants_result=True) for task in range(size)])
    for task in range(size):
        channel.events.put((task, Begun()))
    return supervisor


class FinishedTasks(FakeTasks):
    def finished(self) -> bool:
        return True


@pytest.mark.parametrize("end", [FINISHED, Gone()])
def test_reports_that_arrive_after_the_results_are_heard(end: Event) -> None:
    heard: list[JsonObject] = []
    channel = FakeChannel(1)
    supervisor = supervise(channel, 1, on_report=heard.append, tasks=FinishedTasks())

    def arrive() -> None:
        time.sleep(0.5)
        channel.events.put((0, Report({"number": 1})))
        time.sleep(0.5)
        channel.events.put((0, Report({"number": 2})))
        channel.events.put((0, end))

    thread = threading.Thread(target=arrive)
    thread.start()
    supervisor.watch()
    thread.join()
    assert [report["number"] for report in heard] == [1, 2]


def test_a_spare_does_not_wait_for_a_rank_that_has_finished() -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, Limits(start=patient(1), hang=patient(1), stop_grace=patient(60)))
    ended = (1, Exit(False, True, 137, "stopped", "", None, []))
    channel.answer = lambda task, order: channel.events.put(ended) if (task, order) == (1, Stop()) else None
    fallen = Fallen("killed by SIGKILL", -9, "", [])
    heard = [(0, Ready(0)), (1, Ready(0)), (1, fallen), (1, Begun()), (1, Ready(4, joins=1)), (0, FINISHED)]
    for event in heard:
        channel.events.put(event)
    with pytest.raises(RankLostError, match="rank 1 on h1 failed: killed by SIGKILL"):
        supervisor.watch()


def test_a_spare_that_takes_the_order_to_join_of_its_dead_rank_lets_nobody_wait() -> None:
    """The rank has died while the order was on its way: its spare takes that order, and all train on."""
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, Limits(start=patient(1), hang=None, stop_grace=patient(60)))
    fallen = Fallen("killed by SIGKILL", -9, "", [])
    heard: list[tuple[int, Event]] = [
        *((task, Ready(0)) for task in range(2)),
        *((0, fallen), (1, Ready(4, joins=1)), (0, Ready(4, joins=1))),  # all join again
        *((1, fallen), (1, Ready(4, joins=1))),  # before that order has come
    ]
    for event in heard:
        channel.events.put(event)

    def finish() -> None:
        time.sleep(patient(2))  # longer than a rank may let the others wait
        for task in range(2):
            channel.events.put((task, FINISHED))

    thread = threading.Thread(target=finish)
    thread.start()
    supervisor.watch()
    thread.join()
    assert [order for _, order in channel.sent if isinstance(order, Join)] == [Join({"RENDEZVOUS": "new"})] * 4


def test_a_death_before_an_exception_is_the_cause_of_both() -> None:
    """Horovod may turn the death of a peer into an exception whose text nobody knows."""
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2)
    ended = (1, Exit(False, False, -9, "stopped", "", None, []))
    channel.answer = lambda task, order: channel.events.put(ended) if (task, order) == (1, Stop()) else None
    failure = Failure("ValueError", "a text that nobody knows", "Traceback: ValueError")
    raised = Exit(False, False, 1, "exited with code 1", "", failure, [])
    for event in [(0, Ready(0)), (1, Ready(0)), (1, Fallen("killed by SIGKILL", -9, "", [])), (0, raised)]:
        channel.events.put(event)
    with pytest.raises(RankLostError, match="rank 1 on h1 failed: killed by SIGKILL"):
        supervisor.watch()


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_rank_does_not_wait_to_join_one_that_has_finished(waits_first: bool) -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, Limits(start=patient(1), hang=patient(1), stop_grace=patient(60)))
    heard: list[tuple[int, Event]] = [(1, Ready(0)), (0, FINISHED)]
    for event in heard if waits_first else reversed(heard):
        channel.events.put(event)
    with pytest.raises(RankLostError, match="rank 1 on h1 failed: hung: it waits to join rank 0, whose function has"):
        supervisor.watch()


def test_ranks_are_asked_to_stop_while_reports_come_faster_than_they_are_handled() -> None:
    channel = FakeChannel(1)
    asked, gave_up = threading.Event(), threading.Event()
    heard: list[JsonObject] = []

    def slow(report: JsonObject) -> None:
        time.sleep(0.02)
        heard.append(report)

    supervisor = supervise(channel, 1, on_report=slow)

    def answer(task: int, order: Order) -> None:
        if order == StopSoon():
            asked.set()

    sent = 0

    def flood() -> None:
        nonlocal sent
        while not asked.wait(0.002) and not gave_up.is_set():
            channel.events.put((0, Report({"number": sent})))
            sent += 1
        channel.events.put((0, FINISHED))

    channel.answer = answer
    supervisor.request_stop("the driver received SIGTERM")
    thread = threading.Thread(target=flood)
    thread.start()
    timer = threading.Timer(patient(20), gave_up.set)  # else it would go on for ever
    timer.start()
    supervisor.watch()
    timer.cancel()
    thread.join()
    assert not gave_up.is_set()
    assert [report["number"] for report in heard] == list(range(sent)), "none is lost"


def test_a_rank_that_dies_ends_the_run_while_another_reports_faster_than_it_is_heard() -> None:
    channel = FakeChannel(2)
    ended = threading.Event()

    def answer(task: int, order: Order) -> None:
        if (task, order) == (0, Stop()):
            ended.set()
            channel.events.put((0, Exit(True, False, -9, "stopped", "", None, [])))

    supervisor = supervise(channel, 2, on_report=lambda report: time.sleep(0.02))
    channel.answer = answer

    def flood() -> None:
        number, until = 0, time.monotonic() + patient(60)
        while not ended.wait(0.002) and time.monotonic() < until:
            channel.events.put((0, Report({"number": number})))
            number += 1
            if number == 50:
                channel.events.put((1, Exit(False, False, -9, "killed by SIGKILL", "", None, [])))

    thread = threading.Thread(target=flood)
    thread.start()
    with pytest.raises(RankLostError, match="rank 1 on h1 failed: killed by SIGKILL"):
        supervisor.watch()
    assert ended.is_set(), "it would go on for a minute"
    thread.join()


@pytest.mark.parametrize("port", [None, 1])
def test_a_task_that_the_driver_never_reached_is_not_lost_when_it_falls_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: int | None
) -> None:
    """A firewall may let tasks reach the driver and not the driver reach them."""
    asked: list[str] = []

    def answers(host: str, port: int) -> bool:
        asked.append(host)
        return False

    monkeypatch.setattr(module, "answers", answers)
    channel = FakeChannel(1)
    if port is None:
        channel.events.get()
        channel.events.put((0, Hello(0, "h0", None, "-1", "", "node", "h0", 0, {})))
    supervisor = supervise(channel, 1)
    supervisor._members[0].first_probe.result()  # type: ignore[union-attr]
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.0)
    channel._silent = 99.0
    threading.Timer(1, lambda: channel.events.put((0, FINISHED))).start()
    supervisor.watch()
    assert asked == (["h0"] if port else [])
    assert supervisor.unreachable_hosts == ({"h0"} if port else set())
    assert ("the driver cannot connect to h0, whose task has connected" in caplog.text) == bool(port)


def test_lost_hosts_are_asked_at_once_while_messages_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 16
    reported = threading.Event()
    all_asked = threading.Barrier(size, action=lambda: channel.events.put((0, Report({"still": "heard"}))))

    calls = itertools.count()

    def answers(host: str, port: int) -> bool:
        if next(calls) < size:  # when all have just connected
            return True
        all_asked.wait(patient(50))  # breaks where one is asked after the other
        assert reported.wait(patient(50)), "no message was handled while the hosts were asked"
        return False

    monkeypatch.setattr(module, "answers", answers)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.0)
    channel = FakeChannel(size, silent=99.0)
    supervisor = supervise(channel, size, on_report=lambda report: reported.set())
    with pytest.raises(RankLostError, match="lost: neither its Spark task nor its host answers") as caught:
        supervisor.watch()
    assert [outcome.kind for outcome in caught.value.outcomes] == ["lost"] * size


def test_a_silent_task_whose_host_answers_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answers(host: str, port: int) -> bool:
        asked.append(host)
        channel.events.put((0, FINISHED))
        return True

    monkeypatch.setattr(module, "answers", answers)
    monkeypatch.setattr(module, "_SILENT_SECONDS", 0.0)
    channel = FakeChannel(1, silent=99.0)
    supervise(channel, 1).watch()
    assert asked[0] == "h0"


def test_a_sign_of_life_on_its_way_while_stacks_are_collected_acquits() -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, Limits(start=patient(60), hang=0.5, stop_grace=patient(60)))

    def answer(task: int, order: Order) -> None:
        if isinstance(order, SendStacks):
            channel.events.put((task, StepDone()))
            channel.events.put((task, Stacks(IN_FUNCTION)))
            channel.events.put((task, FINISHED))

    channel.answer = answer
    supervisor.watch()
    assert SendStacks() in [order for _, order in channel.sent]


def test_the_rank_that_the_others_wait_for_hangs() -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, Limits(start=patient(60), hang=0.5, stop_grace=patient(60)))

    def answer(task: int, order: Order) -> None:
        if isinstance(order, SendStacks):
            channel.events.put((task, Stacks(IN_FUNCTION if task == 1 else IN_HOROVOD)))

    channel.answer = answer
    with pytest.raises(RankLostError, match="rank 1 on h1 failed: hung: no sign of life") as caught:
        supervisor.watch()
    assert caught.value.root.traceback == IN_FUNCTION


@pytest.mark.parametrize("at", range(20, 30))
def test_time_in_which_the_driver_itself_stood_still_is_nobodys_hang(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """As after SIGSTOP and SIGCONT, at any place in the loop."""
    channel = FakeChannel(1)
    supervisor = supervise(channel, 1, Limits(start=patient(60), hang=patient(30), stop_grace=patient(60)))
    channel.answer = lambda task, order: channel.events.put((task, Stacks(IN_FUNCTION)))
    clock = time.monotonic
    looks = 0

    def stopped_and_continued() -> float:
        nonlocal looks
        looks += 1
        if looks == at + 30:
            channel.events.put((0, FINISHED))
        return clock() + (3600.0 if looks > at else 0.0)

    monkeypatch.setattr(time, "monotonic", stopped_and_continued)
    supervisor.watch()
    assert looks >= at + 30  # it stood still, and rank 0 finished after that


def test_a_request_reaches_all_and_waits_for_the_last(caplog: pytest.LogCaptureFixture) -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2)
    saved = Failure("StoppedOnRequest", "step 7 is saved", "", on_request=True)
    channel.events.put((1, StopAsked()))

    def answer(task: int, order: Order) -> None:
        if order == StopSoon():
            end = Exit(False, False, 1, "exited with code 1", "", saved, [])
            threading.Timer(2.0 * task, channel.events.put, [(task, end)]).start()

    channel.answer = answer
    with pytest.raises(RankLostError, match="stopped on request: step 7 is saved") as caught:
        supervisor.watch()
    assert [outcome.kind for outcome in caught.value.outcomes] == ["requested"] * 2
    within = f"all ranks are asked to stop within {patient(60):g} s"
    assert f"the task of rank 1 on h1 received SIGTERM: {within}" in caplog.text


def test_a_rank_that_outlasts_the_grace_is_named() -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, Limits(start=patient(60), hang=None, stop_grace=0.2))
    channel.events.put((1, FINISHED))
    supervisor.request_stop("the driver received SIGTERM")
    words = r"rank 0 on h0 failed: still ran 0\.2 s after it was asked to stop \(the driver received SIGTERM\)"
    with pytest.raises(RankLostError, match=words):
        supervisor.watch()


def test_an_executor_that_spark_takes_away_stops_all_ranks() -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2, tasks=FakeTasks("Spark decommissions executor 3"))
    saved = Failure("StoppedOnRequest", "", "", on_request=True)

    def answer(task: int, order: Order) -> None:
        if order == StopSoon():
            channel.events.put((task, Exit(False, False, 1, "exited with code 1", "", saved, [])))

    channel.answer = answer
    with pytest.raises(RankLostError, match="rank 0 on h0 failed: stopped on request"):
        supervisor.watch()
    assert [task for task, order in channel.sent if order == StopSoon()] == [0, 1]


def joined(size: int) -> Joining:
    """All ranks have joined once."""
    joining = Joining(size, dict)
    for task in range(size):
        joining.take(task, 0, 0)
    return joining


def test_a_rank_that_dies_before_all_have_joined_once_ends_the_attempt() -> None:
    """The others begin their training, and would wait for ever for one that goes on in it."""
    died = Outcome(1, "h1", "died", "killed by SIGKILL")
    joining = Joining(2, dict)
    joining.take(0, 0, 0)
    assert not joining.is_replaced(1, died)
    assert joined(2).is_replaced(1, died)


def test_spares_that_die_before_they_join_count_each_time() -> None:
    died, other = Outcome(0, "h0", "died", "killed by SIGKILL"), Outcome(1, "h1", "died", "killed by SIGKILL")
    joining = joined(2)
    assert joining.is_replaced(0, died)
    assert joining.is_replaced(1, other), "both at once count once"
    assert [joining.is_replaced(0, died) for _ in range(3)] == [True, True, False]


def test_a_rank_that_was_stopped_within_the_grace_has_not_outlasted_it() -> None:
    channel = FakeChannel(2)
    supervisor = supervise(channel, 2)
    channel.events.put((1, StopAsked()))
    full = Failure("OSError", "No space left on device", "", on_request=False)

    def answer(task: int, order: Order) -> None:
        if (task, order) == (1, StopSoon()):
            channel.events.put((1, Exit(False, False, 1, "exited with code 1", "", full, [])))
        if (task, order) == (0, Stop()):
            channel.events.put((0, Exit(True, False, -9, "killed by SIGKILL", "", None, [])))

    channel.answer = answer
    with pytest.raises(WorkerError, match="rank 1 on h1 failed: OSError: No space left on device") as caught:
        supervisor.watch()
    assert [outcome.kind for outcome in caught.value.outcomes] == ["stopped", "exception"]
