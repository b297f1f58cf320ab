"""Ranks of the launcher's own tests are new interpreters, as users have them."""

from collections.abc import Iterator

import pytest

from pipelines.launch.rank.fork_server import FORK_SERVER_VARIABLE

FORKED = {"test_fork_server.py", "test_horovod_examples.py", "test_horovod_runner.py", "test_keras_door.py"}
"""Tests whose ranks import TensorFlow, which takes ten seconds in each."""


@pytest.fixture(scope="module", autouse=True)
def _new_interpreters(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in FORKED:
            patch.delenv(FORK_SERVER_VARIABLE)
        yield
