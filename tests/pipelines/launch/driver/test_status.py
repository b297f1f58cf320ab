"""What follows from an attempt at one poll, without any task."""

import pytest

from pipelines.launch.driver.failure import Kind
from pipelines.launch.driver.hangs import is_hanging, suspect, waits_in_collective
from pipelines.launch.driver.members import short_reason
from pipelines.launch.driver.probes import is_probe_due, is_silent
from pipelines.launch.driver.status import AttemptState, AttemptStatus, RankStatus, StopState, first_gone, stop_state
from pipelines.launch.policy import TimeLimits

IN_HOROVOD = 'Current thread 0x1 (most recent call first):\n  File "/site-packages/horovod/mpi_ops.py", line 1 in wait'
IN_TENSORFLOW = IN_HOROVOD.replace("horovod", "tensorflow")
IN_FUNCTION = 'Current thread 0x1 (most recent call first):\n  File "/home/train.py", line 1 in load'
LIMITS = TimeLimits(start=60.0, hang=10.0, stop_grace=30.0)


def rank(
    task: int = 0,
    *,
    is_open: bool = True,
    has_begun: bool = True,
    signs: int = 5,
    last_sign: float = 100.0,
    gone_since: float | None = None,
    stacks: str = "",
) -> RankStatus:
    return RankStatus(task, is_open, has_begun, signs, last_sign, gone_since, stacks)


def attempt(*ranks: RankStatus, now: float = 100.0, ends: tuple[Kind, ...] = ()) -> AttemptStatus:
    return AttemptStatus(now, ranks, ends)


@pytest.mark.parametrize(
    ("ends", "open_ranks", "tasks_ended", "state"),
    [
        ((), 2, False, "running"),
        (("finished",), 1, False, "running"),
        (("requested",), 1, False, "running"),
        (("finished", "finished"), 0, False, "finished"),
        (("finished", "requested"), 0, False, "requested"),
        (("finished",), 1, True, "ended"),
        (("finished", "finished"), 0, True, "ended"),
        (("exception",), 1, False, "failed"),
        (("finished", "consequence"), 0, True, "failed"),
        (("requested", "died"), 1, False, "failed"),
        (("stopped",), 1, False, "failed"),
    ],
)
def test_the_state_of_an_attempt(
    ends: tuple[Kind, ...], open_ranks: int, tasks_ended: bool, state: AttemptState
) -> None:
    ranks = [rank(task, is_open=task < open_ranks) for task in range(2)]
    assert attempt(*ranks, ends=ends).state(tasks_ended=tasks_ended) == state


@pytest.mark.parametrize(
    ("ends", "is_caused", "waits_for_cause", "waits_for_consequences"),
    [
        (("consequence",), False, True, True),
        (("finished", "consequence"), False, True, True),
        (("consequence", "died"), True, False, True),
        (("requested", "consequence"), False, False, True),
        (("hung",), True, False, False),
        (("exception",), True, False, True),
    ],
)
def test_what_a_failed_attempt_waits_for(
    ends: tuple[Kind, ...], is_caused: bool, waits_for_cause: bool, waits_for_consequences: bool
) -> None:
    status = attempt(rank(), ends=ends)
    assert (status.is_caused, status.waits_for_cause, status.waits_for_consequences) == (
        is_caused,
        waits_for_cause,
        waits_for_consequences,
    )


@pytest.mark.parametrize(
    ("reason", "deadline", "state"),
    [
        (None, None, "unasked"),
        ("SIGTERM", None, "due"),
        ("SIGTERM", 100.0, "asked"),
        ("SIGTERM", 99.9, "over"),
    ],
)
def test_the_state_of_a_request_to_stop(reason: str | None, deadline: float | None, state: StopState) -> None:
    assert stop_state(reason, deadline, now=100.0) == state


def test_the_rank_whose_connection_ended_first_is_the_first_that_is_gone() -> None:
    assert first_gone([rank(0), rank(1, gone_since=7.0), rank(2, gone_since=5.0), rank(3)]).task == 2
    assert first_gone([rank(4), rank(5)]).task == 4


@pytest.mark.parametrize(
    ("ranks", "now", "hangs"),
    [
        ([rank(last_sign=100.0)], 110.0, False),
        ([rank(last_sign=100.0)], 110.1, True),
        ([rank(has_begun=False, last_sign=100.0)], 160.0, False),  # the start has a limit of its own
        ([rank(has_begun=False, last_sign=100.0)], 160.1, True),
        ([rank(signs=0, last_sign=50.0), rank(1, last_sign=100.0)], 110.0, False),  # it never reports
        ([rank(signs=0, last_sign=50.0), rank(1, last_sign=100.0)], 110.1, True),
    ],
)
def test_a_rank_without_a_sign_of_life_hangs(ranks: list[RankStatus], now: float, hangs: bool) -> None:
    assert is_hanging(attempt(*ranks, now=now), ranks, LIMITS) == hangs


def test_a_rank_hangs_only_at_the_start_where_there_is_no_other_limit() -> None:
    limits = TimeLimits(start=60.0, hang=None, stop_grace=30.0)
    begun, starting = rank(last_sign=100.0), rank(1, has_begun=False, last_sign=100.0)
    status = attempt(begun, starting, now=1000.0)
    assert [is_hanging(status, asked, limits) for asked in ([begun], [starting], [])] == [False, True, False]


@pytest.mark.parametrize(
    ("ranks", "task"),
    [
        ([rank(0, stacks=IN_HOROVOD, signs=1), rank(1, stacks=IN_FUNCTION)], 1),
        ([rank(0, stacks=IN_TENSORFLOW, signs=3), rank(1, stacks=IN_HOROVOD, signs=2)], 1),  # all wait
        ([rank(0, has_begun=True, signs=0), rank(1, has_begun=False, signs=9)], 1),
        ([rank(0, last_sign=90.0), rank(1, last_sign=80.0)], 1),
        ([rank(0, stacks=IN_HOROVOD), rank(1)], 1),  # it has not even sent its stacks
    ],
)
def test_the_suspect_is_the_rank_for_which_the_others_wait(ranks: list[RankStatus], task: int) -> None:
    assert suspect(ranks).task == task


def test_stacks_of_other_threads_say_nothing() -> None:
    of_another = f"{IN_FUNCTION}\n{IN_HOROVOD.replace('Current thread', 'Thread')}"
    assert [waits_in_collective(stacks) for stacks in (IN_HOROVOD, of_another, "")] == [True, False, False]


def test_a_task_is_silent_when_its_connection_has_ended_or_nothing_comes_over_it() -> None:
    seconds = [(None, 4.9), (None, 5.0), (3.0, 0.0), (3.1, 0.0)]
    assert [is_silent(*each) for each in seconds] == [False, True, False, True]
    assert [is_probe_due(5.0), is_probe_due(5.1)] == [False, True]


@pytest.mark.parametrize(
    ("reason", "short"),
    [
        (
            "Job aborted: ExecutorLostFailure (executor 1 exited): worker lost\nDriver stacktrace:",
            "ExecutorLostFailure (executor 1 exited): worker lost",
        ),
        ("Traceback (most recent call last):\n  File x\npickle.PicklingError: no\n", "pickle.PicklingError: no"),
        ("Traceback (most recent call last):\nTaskKilled (stage)\nValueError: later", "TaskKilled (stage)"),
        ("ValueError: of the JVM\nat org.apache.spark", "ValueError: of the JVM"),
        ("first line\nValueError: no traceback", "first line"),
    ],
)
def test_the_short_reason_is_the_line_that_says_what_happened(reason: str, short: str) -> None:
    assert short_reason(reason) == short
