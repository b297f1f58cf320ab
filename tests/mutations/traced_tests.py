"""Plugin of pytest: coverage's context is the test that runs, and how long each test takes alone.

What a fixture of a module or of the session runs has a context of its own, and belongs to all tests that use the
fixture: else it would belong to the first of them only. When pytest ends, each of its processes writes a file that
`measure.py` reads. It has the seconds of the tests that passed, and the tests of each such fixture.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import traced_processes  # type: ignore[import-not-found]  # both files are in the measured environment

_CONFIG = os.environ[traced_processes.CONFIG_VARIABLE]
_outcomes: dict[str, list[str]] = defaultdict(list)
_seconds: dict[str, float] = defaultdict(float)
"""Of a test, without the shared fixtures that it is the first to use."""
_setup_seconds: dict[str, float] = {}
"""Of a shared fixture, by its context."""
_contexts: dict[Any, str] = {}
"""Context in which a shared fixture was made last."""
_tests: dict[str, list[str]] = defaultdict(list)
"""Tests that use a shared fixture, by its context."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    """Tell all processes that come from this one where its current test is written."""
    traced_processes.lead(_file())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record what runs in here as that of this test."""
    traced_processes.switch(item.nodeid)
    _outcomes[item.nodeid] = []
    try:
        return (yield)
    finally:
        traced_processes.switch("")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, Any]:
    """Record what makes a shared fixture as that of the fixture."""
    if fixturedef.scope == "function":
        return (yield)
    context = f"fixture {fixturedef.argname}[{request.param_index}] of {request.node.nodeid or 'the session'}"
    _contexts[fixturedef] = context
    test, start = traced_processes.switch(context), time.monotonic()
    try:
        return (yield)
    finally:
        _setup_seconds[context] = time.monotonic() - start
        _seconds[test] -= _setup_seconds[context]
        traced_processes.switch(test)


def pytest_runtest_teardown(item: Any) -> None:
    """Note which shared fixtures this test has used."""
    for definition in item._request._fixture_defs.values():
        if definition in _contexts:
            _tests[_contexts[definition]].append(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of one part of a test, if it has run in this process."""
    if report.nodeid in _outcomes:
        _outcomes[report.nodeid].append(report.outcome)
        _seconds[report.nodeid] += report.duration


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Write the times and the fixtures' tests."""
    shared: dict[str, float] = defaultdict(float)
    for context, tests in _tests.items():
        for test in tests:
            shared[test] += _setup_seconds[context]
    passed = [test for test, outcomes in _outcomes.items() if set(outcomes) == {"passed"}]
    seconds = {test: round(max(_seconds[test], 0.0) + shared[test], 3) for test in passed}
    _file().with_suffix(".json").write_text(json.dumps({"seconds": seconds, "tests": _tests}))


def _file() -> Path:
    return Path(_CONFIG).parent / "processes" / f"{os.getpid()}.test"
