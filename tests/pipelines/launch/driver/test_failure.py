import traceback
from dataclasses import replace

import pytest

from pipelines.launch.driver.failure import (
    InfrastructureError,
    Kind,
    Outcome,
    RankLostError,
    WorkerError,
    failure_of,
    outcome_of_exit,
    with_early_return,
)
from pipelines.launch.rank.membership import NO_COMMON_STATE
from pipelines.launch.wire.messages import FunctionFailure, ProcessExit

SHUT_DOWN = FunctionFailure(
    "UnknownError", "Horovod has been shut down. This was caused by an exception on one of the ranks", "t0"
)
PLAIN = ProcessExit(
    stopped=False,
    finished=False,
    exit_code=1,
    death="exited with code 1",
    faults="",
    failure=None,
    last_lines=[],
)
GRAPH_ERROR = """Graph execution error:

Detected at node gradients/CheckNumerics defined at (most recent call last):
  File "train.py", line 3, in <module>

gradients are not finite : Tensor had NaN values
\t [[{{node gradients/CheckNumerics}}]] [Op:__inference_step_12]"""


@pytest.mark.parametrize(
    ("end", "kind", "summary"),
    [
        (replace(PLAIN, failure=SHUT_DOWN), "consequence", "UnknownError: Horovod has been shut down"),
        (replace(PLAIN, failure=replace(SHUT_DOWN, message="boom")), "exception", "UnknownError: boom"),
        (
            replace(PLAIN, failure=FunctionFailure("RuntimeError", f"{NO_COMMON_STATE}: nothing is there", "t")),
            "consequence",
            "RuntimeError: a rank has died before every rank had done a step",
        ),
        (
            replace(PLAIN, failure=FunctionFailure("InvalidArgumentError", GRAPH_ERROR, "t")),
            "exception",
            "InvalidArgumentError: gradients are not finite : Tensor had NaN values",
        ),
        (
            replace(PLAIN, failure=FunctionFailure("StoppedOnRequest", "step 7 is saved", "t", on_request=True)),
            "requested",
            "stopped on request: step 7 is saved",
        ),
        (replace(PLAIN, finished=True, exit_code=0), "finished", "finished"),
        (
            replace(PLAIN, finished=True, exit_code=3, death="exited with code 3"),
            "died",
            "exited with code 3 after the",
        ),
        (replace(PLAIN, stopped=True), "stopped", "stopped because"),
        (replace(PLAIN, exit_code=-6, death="killed by SIGABRT"), "died", "killed by SIGABRT"),
        (
            replace(PLAIN, exit_code=-6, death="killed by SIGABRT", last_lines=["what(): [gloo/transport/tcp/pair.cc"]),
            "consequence",
            "killed by SIGABRT",
        ),
    ],
)
def test_an_exit_is_judged(end: ProcessExit, kind: Kind, summary: str) -> None:
    outcome = outcome_of_exit(3, "a", end)
    assert (outcome.rank, outcome.kind) == (3, kind)
    assert outcome.summary.startswith(summary)


DIED = Outcome(2, "a", "died", "killed by SIGKILL")
CONSEQUENCE = outcome_of_exit(0, "a", replace(PLAIN, failure=SHUT_DOWN))


def test_consequences_are_not_the_cause() -> None:
    cause = Outcome(1, "b", "exception", "ValueError: boom\nand more", 1, "t1", ("one", "two"))
    others = [Outcome(rank, "b", "stopped", "stopped because another rank failed") for rank in (2, 3)]
    error = failure_of([CONSEQUENCE, cause, *others])
    assert (type(error), error.root) == (WorkerError, cause)
    assert not issubclass(WorkerError, InfrastructureError)
    assert str(error) == (
        "rank 1 on b failed: ValueError: boom\nand more\n\n"
        "rank  host  outcome\n"
        "   0  a     consequence: UnknownError: Horovod has been shut down\n"
        "   1  b     ValueError: boom  <- root cause\n"
        " 2-3  b     stopped because another rank failed\n\n"
        "Traceback of rank 1:\nt1\n\n"
        "Last lines of rank 1:\none\ntwo"
    )


@pytest.mark.parametrize(
    "outcomes",
    [
        [DIED, Outcome(0, "a", "exception", "ValueError: late")],
        [CONSEQUENCE],  # without a cause it is the network's
        [Outcome(1, "a", "requested", "stopped on request"), CONSEQUENCE],
    ],
)
def test_the_first_cause_counts_or_a_request_or_the_network(outcomes: list[Outcome]) -> None:
    error = failure_of(outcomes)
    assert (type(error), error.root) == (RankLostError, outcomes[0])
    assert issubclass(RankLostError, InfrastructureError), "it is tried again"


def test_a_rank_that_has_returned_while_others_waited_is_an_error_of_the_function() -> None:
    error = failure_of(with_early_return([CONSEQUENCE, Outcome(1, "b", "finished", "finished", 0, "", ("one",))]))
    assert isinstance(error, WorkerError)
    words = "returned while rank 0 was in a collective operation: all ranks need equal numbers of steps"
    assert str(error) == (
        f"rank 1 {words}\n\n"
        "rank  host  outcome\n"
        "   0  a     consequence: UnknownError: Horovod has been shut down\n"
        f"   1  b     {words}  <- root cause\n\n"
        "Traceback of rank 0:\nt0\n\n"
        "Last lines of rank 1:\none"
    )


def test_tensorflows_trace_of_the_graph_does_not_hide_what_failed() -> None:
    import tensorflow as tf

    @tf.function  # type: ignore[misc]
    def step(value: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.debugging.Assert(value > 0.0, ["gradients are not finite", "conv1/kernel"])]):
            return tf.identity(value)

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        step(tf.constant(-1.0))
    text = "".join(traceback.format_exception(caught.value))
    failure = FunctionFailure(caught.typename, str(caught.value), text)
    assert "Detected at node" in text
    error_text = str(failure_of([outcome_of_exit(0, "a", replace(PLAIN, failure=failure))]))
    words = "InvalidArgumentError: assertion failed: [gradients are not finite] [conv1/kernel]"
    assert error_text.startswith(f"rank 0 on a failed: {words}\n")
    assert [text for text in ("Detected at node", "{{node") if text in error_text] == []
    assert error_text.count("in step") == text.count("in step") - 1
