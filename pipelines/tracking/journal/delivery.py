"""The way from a journal to the store, beside training or at its end, whether or not the store answers."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, RunTag
from mlflow.exceptions import MlflowException, RestException

from pipelines.tracking.journal.journal import Entry, Journal
from pipelines.tracking.journal.points import absent_rows, log_points
from pipelines.tracking.store.store import TrackedRun, quote_environment, reason_of, short_waits

News = Literal["away", "back", "refused"]
OnNews = Callable[[News, str], None]
"""Called when the store does not answer, when it does again, or when it refuses a write for good, with the reason."""

OFFLINE = "tracking.offline=true"
"""Why nothing is delivered where training does without a store."""
PATIENCE_SECONDS = 1
"""How long the end of a job waits for a store that is known to be away."""
_SECONDS_FOR_AN_ANSWER = 4
"""How long it waits for one that may only be slow. Together they are what an outage costs a job."""
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
TIMEOUT_OF_THREAD = 10
"""Seconds that a small request of the thread may take; a file has more."""
_SECONDS_BETWEEN_REQUESTS = 0.05
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 5.0
_UPLOAD_SECONDS = 120
_REFUSALS = {
    "BAD_REQUEST",
    "INVALID_PARAMETER_VALUE",
    "INVALID_STATE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
}
_REFUSED_FILES = {400, 413, 414, 422}
"""Answers of HTTP to an upload that the same upload gets again: a proxy's limit to the size of a request, mostly."""
_WORDS: dict[News, str] = {"away": "does not answer", "back": "answers again", "refused": "refuses a write for good"}
_log = logging.getLogger(__name__)


def warn(news: News, reason: str) -> None:
    """Write the news to the log, where nobody else takes them."""
    _log.warning("MLflow %s%s", _WORDS[news], f": {reason}" if reason else "")


class Delivery:
    """Delivers the entries of a journal in their order, each until the store has taken it.

    A store that answers but refuses an entry for good is told of once, and the entry is dropped. One that does not have
    the run, or has it among the deleted ones, counts as away: the run may be restored. Repeating a write that the store
    had taken already changes nothing there: points carry the time at which they were made.
    """

    def __init__(self, run: TrackedRun, journal: Journal, on_news: OnNews = warn) -> None:
        """Connect; nothing is delivered yet."""
        self._run = run
        quote_environment(run.uri)
        self._client = None if run.is_offline else MlflowClient(run.uri)
        self._journal = journal
        self._on_news = on_news
        self._reason = ""
        self._answer_seconds = _SECONDS_FOR_AN_ANSWER
        self._refused: set[str] = set()
        self._progress = threading.Condition()
        self._last_progress = time.monotonic()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._has_shortened = False

    def start(self) -> None:
        """Deliver from a thread from now on; without a store everything stays in the journal."""
        if self._client is None:
            return
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would log every retry of an outage
        if _TIMEOUT not in os.environ:  # this process is a rank's own; MLflow would wait for two minutes
            os.environ[_TIMEOUT], self._has_shortened = str(TIMEOUT_OF_THREAD), True
        self._thread = threading.Thread(target=self._deliver_until_the_end, name="tracking", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that the journal has something new to deliver."""
        with self._progress:
            self._progress.notify_all()

    def drain(self, patience: float = PATIENCE_SECONDS, *, answers: bool = False) -> str:
        """Wait until everything is delivered.

        Args:
            patience: Seconds without progress after which this gives up where the store is away; 0 does not ask a store
                again that did not answer.
            answers: Whether the store has just answered another process: it then has the time of one that may be slow.

        Returns:
            Empty where all is delivered, else why the store does not take the rest.
        """
        if self._client is None:
            return OFFLINE if self._journal.next() is not None else ""
        if self._thread is None:
            return self._drain_here(patience, answers)
        started = time.monotonic()
        with self._progress:
            self._progress.notify_all()
            while (entry := self._journal.next()) is not None:
                # A folder is uploaded by one write, once the store has answered.
                answer = _UPLOAD_SECONDS if entry.kind == "folder" else _SECONDS_FOR_AN_ANSWER
                limit = patience if self._reason else max(patience, answer)
                left = max(started, self._last_progress) + limit - time.monotonic()
                if left <= 0:
                    return self._reason or f"no answer within {limit:.0f} s"
                self._progress.wait(left)
        return ""

    def end(self) -> None:
        """Let the thread end when its request has; does not wait for it."""
        if self._has_shortened:
            os.environ.pop(_TIMEOUT, None)
            self._has_shortened = False
        with self._progress:
            self._ending = True
            self._progress.notify_all()

    def _drain_here(self, patience: float, answers: bool) -> str:
        self._answer_seconds = PATIENCE_SECONDS if self._reason and not answers else _SECONDS_FOR_AN_ANSWER
        if patience == 0 and self._reason:
            return self._reason if self._journal.next() is not None else ""
        deadline = time.monotonic() + patience
        while (entry := self._journal.next()) is not None:
            if self._deliver(entry):
                deadline = time.monotonic() + patience
            elif time.monotonic() + _FIRST_PAUSE_SECONDS > deadline:
                return self._reason
            else:
                time.sleep(_FIRST_PAUSE_SECONDS)
        return ""

    def _deliver_until_the_end(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._ending:
            entry = self._journal.next()
            if entry is None:
                with self._progress:
                    if not self._ending and self._journal.next() is None:
                        self._progress.wait(_LONGEST_PAUSE_SECONDS)
                continue
            if self._deliver(entry):
                pause = _FIRST_PAUSE_SECONDS
                with self._progress:
                    self._last_progress = time.monotonic()
                    self._progress.notify_all()
                time.sleep(_SECONDS_BETWEEN_REQUESTS)
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _deliver(self, entry: Entry) -> bool:
        """Try to deliver one entry; whether it is done with."""
        try:
            if not self._journal.is_replaced(entry):
                self._send(entry)
        except Exception as error:  # of MLflow, its HTTP and its storage libraries, each with errors of its own
            if not _is_refusal(error, entry) or not self._has_run():
                self._store_is_away(error)
                return False
            self._tell_refused(reason_of(error), entry.path)
        if self._reason:
            self._reason = ""
            _log.info("MLflow answers again")
            self._on_news("back", "")
        self._journal.delivered(entry)
        return True

    def _has_run(self) -> bool:
        assert self._client is not None
        try:
            with self._waits():
                return str(self._client.get_run(self._run.run_id).info.lifecycle_stage) == LifecycleStage.ACTIVE
        except Exception:  # as in `_deliver`
            return False

    def _tell_refused(self, reason: str, path: str) -> None:
        reason = f"{path}: {reason}" if path else reason
        _log.info("MLflow refused a write: %s", reason)
        if path not in self._refused:
            self._refused.add(path)
            self._on_news("refused", reason)

    def _store_is_away(self, error: Exception) -> None:
        if self._ending:  # the journal may be closed already
            return
        away = bool(self._reason)
        self._reason = reason_of(error)
        if not away:
            _log.info("MLflow does not take writes, which are kept in %s: %s", self._journal.folder, self._reason)
            self._on_news("away", self._reason)
            with self._progress:
                self._progress.notify_all()

    def _send(self, entry: Entry) -> None:
        content, run_id, client = self._journal.content(entry), self._run.run_id, self._client
        assert client is not None
        match entry.kind:
            case "metrics":
                with self._waits():
                    points = content["points"]
                    if "known_by" in content:
                        points = absent_rows(client, run_id, points, content["known_by"])
                    if points:
                        log_points(client, self._run.uri, run_id, points)
            case "tags":
                tags = [RunTag(name, value) for name, value in content["tags"].items()]
                with self._waits():
                    client.log_batch(run_id, tags=tags)
            case "file":
                file = self._journal.file_of(content)
                if file.is_file():  # else it was delivered, and the process died before it could say so
                    with self._waits():
                        client.log_artifact(run_id, str(file), entry.path.rpartition("/")[0] or None)
            case "folder":
                folder = self._journal.folder_of(content)
                if not folder.is_dir():  # MLflow would upload nothing, and say nothing
                    self._tell_refused(f"{folder} is not there any more: its files are not among the artifacts", "")
                    return
                with self._waits():
                    client.get_run(run_id)  # a store that is away fails here, and soon
                with self._waits(_UPLOAD_SECONDS):
                    client.log_artifacts(run_id, str(folder), entry.path)

    @contextmanager
    def upload_waits(self) -> Iterator[None]:
        """Give every request of this process the time of an upload meanwhile, where it has short waits after `start`.

        A server that hands files on to another storage answers only when it has done so.
        """
        if not self._has_shortened:
            yield
            return
        os.environ[_TIMEOUT] = str(_UPLOAD_SECONDS)
        try:
            yield
        finally:
            if self._has_shortened:  # else `end` has left the environment as it was
                os.environ[_TIMEOUT] = str(TIMEOUT_OF_THREAD)

    def _waits(self, timeout: int | None = None) -> AbstractContextManager[None]:
        """Short waits in the process that a user's notebook may be; ranks have them in their environment."""
        if self._thread is not None:
            return nullcontext() if timeout is None else self.upload_waits()
        if timeout is None:  # one request: it may wait for a server that takes connections and never answers
            return short_waits(self._answer_seconds, retries=0)
        return short_waits(timeout)


def _is_refusal(error: Exception, entry: Entry) -> bool:
    """Whether the store itself says that it never takes this write; a gateway's error page is none of its answers.

    Of an upload a gateway's answer is one where it tells the same to each repetition.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)  # of `requests`, with which MLflow uploads
    if entry.kind in ("file", "folder") and status in _REFUSED_FILES:
        return True
    if not isinstance(error, MlflowException) or error.error_code not in _REFUSALS:
        return False
    return isinstance(error, RestException) or not str(error).startswith("API request to")
