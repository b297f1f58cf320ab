"""Limits of tests on a busy machine."""

import os
from types import SimpleNamespace

import pytest

from tests import patience
from tests.patience import VARIABLE, patience_at, patient


@pytest.mark.parametrize(("value", "seconds"), [("1", 30.0), ("2.5", 75.0), (None, 30.0)])
def test_a_limit_is_multiplied_by_the_value_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, seconds: float
) -> None:
    monkeypatch.setenv(VARIABLE, value or "")
    if value is None:
        monkeypatch.delenv(VARIABLE)
    assert patient(30) == seconds


@pytest.mark.parametrize(("load", "times"), [(0.0, 1), (1.9, 1), (2.0, 1), (3.0, 1.5), (16.0, 8), (500.0, 8)])
def test_the_load_decides_where_nobody_has_said_it(load: float, times: float) -> None:
    assert patience_at(load) == times


@pytest.mark.parametrize(
    ("before", "config", "after"),
    [
        (None, SimpleNamespace(), "3.50"),
        ("2", SimpleNamespace(), "2"),
        (None, SimpleNamespace(workerinput={}), None),
    ],
    ids=["decided", "given", "a process of xdist"],
)
def test_it_is_decided_once(
    monkeypatch: pytest.MonkeyPatch, before: str | None, config: SimpleNamespace, after: str | None
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (7.0, 99.0, 99.0))
    monkeypatch.setenv(VARIABLE, before or "")
    if before is None:
        monkeypatch.delenv(VARIABLE)
    patience.pytest_configure(config)
    assert os.environ.get(VARIABLE) == after


@pytest.mark.parametrize(
    ("times", "command_line", "expected"),
    [
        ("1", None, [{}, {"timeout": 20, "method": "thread"}]),
        ("3", None, [{"timeout": 900.0}, {"timeout": 60.0, "method": "thread"}]),
        ("3", 5.0, [{}, {"timeout": 60.0, "method": "thread"}]),
    ],
    ids=["idle", "busy", "busy, with a limit of the command line"],
)
def test_a_test_may_take_longer(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    times: str,
    command_line: float | None,
    expected: list[dict[str, object]],
) -> None:
    monkeypatch.setenv(VARIABLE, times)
    config = SimpleNamespace(getini={"timeout": "300"}.get, getoption={"timeout": command_line}.get)
    items = [
        pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for name in ("plain", "marked")
    ]
    items[1].add_marker(pytest.mark.timeout(timeout=20, method="thread"))
    patience.pytest_collection_modifyitems(config, items)
    closest = [item.get_closest_marker("timeout") for item in items]
    assert [marker.kwargs if marker else {} for marker in closest] == expected


def test_a_positional_limit_is_one_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    item = pytest.Function.from_parent(request.node.parent, name="marked", callobj=lambda: None)
    item.add_marker(pytest.mark.timeout(20))
    patience.pytest_collection_modifyitems(request.config, [item])
    assert item.get_closest_marker("timeout").kwargs == {"timeout": 40.0}
