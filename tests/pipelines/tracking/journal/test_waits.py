"""What a store that does not answer costs a driver: one request of 4 seconds, and one of 1 second at the end."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from pipelines.tracking.journal import delivery
from pipelines.tracking.journal.delivery import Delivery, News, warn
from pipelines.tracking.journal.journal import Journal
from pipelines.tracking.journal.writer import RunWriter
from pipelines.tracking.store.runs import end_failed_run
from pipelines.tracking.store.store import TrackedRun


class FrozenStore:
    """A store whose every request takes all the time that it may take; its clock is the test's own."""

    def __init__(self) -> None:
        self.seconds, self.is_frozen = 0.0, True
        self.taken: list[str] = []

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def get_run(self, run_id: str) -> None:
        if self.is_frozen:
            tries = 1 + int(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
            self.seconds += tries * int(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"])
            raise MlflowException("API request to http://away failed with timeout")

    def log_batch(self, run_id: str, *, tags: Any) -> None:
        self.get_run(run_id)
        self.taken += [tag.key for tag in tags]

    def log_artifacts(self, run_id: str, folder: str, path: str) -> None:
        self.get_run(run_id)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FrozenStore:
    for name in waits():
        monkeypatch.delenv(name)
    frozen = FrozenStore()
    monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=frozen.monotonic, sleep=frozen.sleep))
    monkeypatch.setattr(delivery, "runs_client", lambda uri: frozen)
    return frozen


def test_an_outage_costs_a_driver_five_seconds_however_many_attempts_it_makes(
    store: FrozenStore, tmp_path: Path
) -> None:
    news: list[str] = []
    journal = Journal(tmp_path, None)
    sending = Delivery(TrackedRun("http://away", "a"), journal, on_news=lambda said, reason: news.append(said))
    for attempt in range(4):
        journal.append("tags", {"tags": {f"attempt-{attempt}": "1"}}, after_step=0)
        assert "timeout" in sending.drain(patience=0)
    assert store.seconds == 4
    for answers, seconds in ((False, 5), (True, 9)):  # where a rank has just reached the store, it may only be slow
        assert ("timeout" in sending.drain(answers=answers), store.seconds) == (True, seconds)
    store.is_frozen = False
    assert (sending.drain(), store.taken, news) == (
        "",
        [f"attempt-{attempt}" for attempt in range(4)],
        ["away", "back"],
    )
    # A later outage is another one.
    store.is_frozen = True
    journal.append("tags", {"tags": {"attempt-4": "1"}}, after_step=0)
    assert ("timeout" in sending.drain(patience=0), store.seconds) == (True, 13)


def test_a_store_that_is_away_is_not_given_the_time_of_an_upload(store: FrozenStore, tmp_path: Path) -> None:
    (tmp_path / "run" / "traces").mkdir(parents=True)
    journal = Journal(tmp_path / "run" / "tracking" / "journal", None)
    journal.append("folder", {"folder": "traces"}, after_step=0, path="traces")
    sending = Delivery(TrackedRun("http://away", "a"), journal, on_news=lambda said, reason: None)
    assert ("timeout" in sending.drain(patience=0), store.seconds) == (True, 4)


@pytest.mark.parametrize(
    ("news", "words"),
    [("away", "does not answer"), ("back", "answers again"), ("refused", "refuses a write for good")],
)
def test_news_that_nobody_takes_are_warnings(news: News, words: str, caplog: pytest.LogCaptureFixture) -> None:
    warn(news, "why")
    warn(news, "")
    assert caplog.messages == [f"MLflow {words}: why", f"MLflow {words}"]


def waits() -> dict[str, str]:
    """How long MLflow's requests wait in this process, as far as the environment says so."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_HTTP_REQUEST")}


@pytest.fixture
def silent_server() -> Iterator[tuple[str, list[socket.socket]]]:
    """An address that takes connections and never answers, and its connections."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take() -> None:
            with suppress(OSError):  # closed
                while True:
                    taken.append(server.accept()[0])

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)
    for connection in taken:
        connection.close()


@pytest.mark.long
def test_a_server_that_takes_connections_and_never_answers_is_asked_once(
    silent_server: tuple[str, list[socket.socket]], tmp_path: Path
) -> None:
    uri, connections = silent_server
    run, before = TrackedRun(uri, "a" * 32), waits()
    writer = RunWriter(run, tmp_path / "journal", on_news=lambda news, reason: None)
    writer.tags({"attempt": "1"})
    reason = writer.drain(patience=0)
    assert "timed out" in reason
    asked = len(connections)
    assert asked >= 1
    for attempt in ("2", "3"):
        writer.tags({"attempt": attempt})
        assert writer.drain(patience=0) == reason
    assert not end_failed_run(run, "FAILED", away=reason)
    assert len(connections) == asked, "within an outage the store is not asked again"
    assert writer.drain()
    assert len(connections) > asked, "the end of the job asks once more"
    assert writer.pending == 3
    writer.close()
    assert waits() == before, "the environment may be that of a user's notebook"
