"""Messages as JSON: what is decoded is what was encoded, and other data is refused."""

import pytest

from pipelines.launch.wire.encoding import MessageKinds, encode
from pipelines.launch.wire.messages import (
    FunctionFailure,
    Hello,
    LogPart,
    Message,
    Opening,
    ProcessExit,
    ReadyToJoin,
    Report,
    RunRank,
    decode,
)

HELLO = Hello(3, "h3", None, "-1", "", "node", "10.0.0.3", 64, {"keras": "3"})


@pytest.mark.parametrize(
    "message",
    [
        Opening("a link", HELLO, orders=2),
        ProcessExit(
            False, False, 1, "exited with code 1", "", FunctionFailure("KeyError", "3", "Traceback"), ["a line"]
        ),
        ProcessExit(True, False, -9, "killed by SIGKILL", "", None, []),
        Report({"loss": 0.1, "nested": {"values": [1, None, "ä\n"]}}),
        LogPart(0, 12, ["a line", "another"]),
    ],
)
def test_what_was_encoded_is_decoded_with_its_number(message: Message) -> None:
    assert decode(encode(message, 7)) == (message, 7)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'["ReadyToJoin", 0]',
        b'["ReadyToJoin", 0, 5]',
        b'["ReadyToJoin", 0, {}]',
        b'["ReadyToJoin", 0, {"progress": "5"}]',
        b'["ReadyToJoin", 0, {"progress": 5, "unknown": 1}]',
        b'["ReadyToJoin", "first", {"progress": 5}]',
        b'["Unknown", 0, {}]',
        b'[["ReadyToJoin"], 0, {}]',
        b'["Opening", 0, {"link": "a", "hello": null, "orders": 0}]',
        b'["Opening", 0, {"link": "a", "hello": {"task": 0}, "orders": 0}]',
        b'["RunRank", 0, {"rank": 0, "environment": [], "wants_result": true}]',
    ],
)
def test_other_data_is_no_message(data: bytes) -> None:
    with pytest.raises(ValueError, match="is no message of this connection"):
        decode(data)


def test_an_end_accepts_its_own_kinds_only() -> None:
    kinds = MessageKinds[ReadyToJoin](ReadyToJoin)
    assert kinds.decode(encode(ReadyToJoin(5))) == (ReadyToJoin(5), 0)
    with pytest.raises(ValueError, match="is no message of this connection"):
        kinds.decode(encode(RunRank(0, {}, wants_result=True)))


def test_a_report_that_json_cannot_represent_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        encode(Report({"model": object()}))
