"""The delivery from a journal to the store, during training or at its end."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Metric, RunTag
from mlflow.exceptions import MlflowException, RestException
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request, verify_rest_response

from pipelines.tracking.journal.journal import Entry, Journal
from pipelines.tracking.store.store import TrackedRun, quote_environment, reason_of, runs_client, short_waits

News = Literal["away", "back", "refused"]
OnNews = Callable[[News, str], None]
"""A function called with the reason when the store stops or resumes answering, or refuses a write for good."""

PATIENCE_SECONDS = 1
"""Seconds that the end of a job waits for a store that is known not to answer."""
_SECONDS_FOR_AN_ANSWER = 4
"""Seconds that the end of a job waits for a store that may only be slow. An outage costs a job the sum of both."""
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
TIMEOUT_OF_THREAD = 10
"""Seconds that a small request of the thread may take; a file may take longer."""
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
"""HTTP status codes that repeat for the same upload, mostly because of a proxy's limit to the size of a request."""
_WORDS: dict[News, str] = {"away": "does not answer", "back": "answers again", "refused": "refuses a write for good"}
_ENDPOINT = "/api/2.0/mlflow/runs/log-batch"

Row = tuple[str, int, float, int]
"""A point: name, step, value, milliseconds since 1970."""
_NAMED = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Texts for numbers that plain JSON lacks, as in the JSON of protocol buffers."""
_log = logging.getLogger(__name__)


def warn(news: News, reason: str) -> None:
    """Write the news to the log, if no other function handles them."""
    _log.warning("MLflow %s%s", _WORDS[news], f": {reason}" if reason else "")


class Delivery:
    """Delivers the entries of a journal in order, and repeats each one until the store has accepted it.

    If the store refuses an entry for good, this reports it once and drops the entry. A refused file is kept in the
    run's folder, and the report names it. A store without the run, or with the run among the deleted ones, counts as
    not answering, because the run may be restored. Repeating an accepted write changes nothing in the store, because
    points contain the time of their measurement.
    """

    def __init__(self, run: TrackedRun, journal: Journal, on_news: OnNews = warn) -> None:
        """Create the client; nothing is delivered yet."""
        self._run = run
        quote_environment(run.uri)
        self._client = None if run.is_offline else runs_client(run.uri)
        self._journal = journal
        self._on_news = on_news
        self._reason = ""
        self._answer_seconds = _SECONDS_FOR_AN_ANSWER
        self._refused: set[str] = set()
        self._last_progress = time.monotonic()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._has_shortened = False

    def start(self) -> None:
        """Deliver from a thread from now on; without a store everything stays in the journal."""
        if self._client is None:
            return
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # otherwise it logs every retry of an outage
        if _TIMEOUT not in os.environ:  # this process is a rank's own; MLflow would wait for two minutes
            os.environ[_TIMEOUT], self._has_shortened = str(TIMEOUT_OF_THREAD), True
        self._thread = threading.Thread(target=self._deliver_until_the_end, name="tracking", daemon=True)
        self._thread.start()

    def drain(self, patience: float = PATIENCE_SECONDS, *, answers: bool = False) -> str:
        """Wait until everything is delivered.

        Args:
            patience: Seconds without progress after which this gives up if the store does not answer. With 0, this does
                not ask a store again that did not answer.
            answers: Whether the store has just answered another process; then it has the time of a slow store.

        Returns:
            Empty if all is delivered, else the reason why the store does not accept the rest.
        """
        if self._client is None:
            return "tracking.offline=true" if self._journal.next() is not None else ""
        if self._thread is None:
            return self._drain_here(patience, answers)
        started = time.monotonic()
        with self._journal.changed:
            while (entry := self._journal.next()) is not None:
                # One write uploads a whole folder, once the store has answered.
                answer = _UPLOAD_SECONDS if entry.kind == "folder" else _SECONDS_FOR_AN_ANSWER
                limit = patience if self._reason else max(patience, answer)
                left = max(started, self._last_progress) + limit - time.monotonic()
                if left <= 0:
                    return self._reason or f"no answer within {limit:.0f} s"
                self._journal.changed.wait(left)
        return ""

    def end(self) -> None:
        """Let the thread end after its current request, without waiting for it."""
        if self._has_shortened:
            os.environ.pop(_TIMEOUT, None)
            self._has_shortened = False
        with self._journal.changed:
            self._ending = True
            self._journal.changed.notify_all()

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
                with self._journal.changed:
                    if not self._ending and self._journal.next() is None:
                        self._journal.changed.wait(_LONGEST_PAUSE_SECONDS)
                continue
            if self._deliver(entry):
                pause = _FIRST_PAUSE_SECONDS
                with self._journal.changed:
                    self._last_progress = time.monotonic()
                    self._journal.changed.notify_all()
                time.sleep(_SECONDS_BETWEEN_REQUESTS)
            else:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _deliver(self, entry: Entry) -> bool:
        """Try to deliver one entry; return whether it is delivered or dropped."""
        kept = None
        try:
            if not self._journal.is_replaced(entry):
                self._send(entry)
        except Exception as error:  # MLflow, its HTTP and its storage libraries each have their own errors
            if not _is_refusal(error, entry) or not self._has_run():
                self._store_is_away(error)
                return False
            kept = self._journal.refused_as(entry)
            words = f"; it is kept in the run's folder as refused/{entry.path}" if kept else ""
            self._tell_refused(reason_of(error) + words, entry.path)
        if self._reason:
            self._reason = ""
            _log.info("MLflow answers again")
            self._on_news("back", "")
        self._journal.delivered(entry, kept)
        return True

    def _has_run(self) -> bool:
        assert self._client is not None
        try:
            with self._waits():
                return str(self._client.get_run(self._run.run_id).info.lifecycle_stage) == LifecycleStage.ACTIVE
        except Exception:  # same as in `_deliver`
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
            with self._journal.changed:
                self._journal.changed.notify_all()

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
                if file.is_file():  # else it was delivered, and the process died before recording that
                    with self._waits():
                        client.log_artifact(run_id, str(file), entry.path.rpartition("/")[0] or None)
            case "folder":
                folder = self._journal.folder_of(content)
                if not folder.is_dir():  # MLflow would upload nothing without an error
                    self._tell_refused(f"{folder} is not there any more: its files are not among the artifacts", "")
                    return
                with self._waits():
                    client.get_run(run_id)  # fails here quickly if the store does not answer
                with self._waits(_UPLOAD_SECONDS):
                    client.log_artifacts(run_id, str(folder), entry.path)

    @contextmanager
    def upload_waits(self) -> Iterator[None]:
        """Give every request of this process the time of an upload during this block, if `start` has shortened waits.

        A server that forwards files to another storage answers only after that.
        """
        if not self._has_shortened:
            yield
            return
        os.environ[_TIMEOUT] = str(_UPLOAD_SECONDS)
        try:
            yield
        finally:
            if self._has_shortened:  # else `end` has restored the environment
                os.environ[_TIMEOUT] = str(TIMEOUT_OF_THREAD)

    def _waits(self, timeout: int | None = None) -> AbstractContextManager[None]:
        """Return a context of short waits for a driver, which may be a notebook; ranks set them in `start`."""
        if self._thread is not None:
            return nullcontext() if timeout is None else self.upload_waits()
        if timeout is None:  # one request: the server may accept connections and never answer
            return short_waits(self._answer_seconds, retries=0)
        return short_waits(timeout)


def _is_refusal(error: Exception, entry: Entry) -> bool:
    """Return whether the store itself refuses this write for good; a gateway's error page is no answer of the store.

    For an upload, a gateway's answer counts too if it is the same for each repetition.
    """
    status = getattr(getattr(error, "response", None), "status_code", None)  # of `requests`, which MLflow uploads with
    if entry.kind in ("file", "folder") and status in _REFUSED_FILES:
        return True
    if not isinstance(error, MlflowException) or error.error_code not in _REFUSALS:
        return False
    return isinstance(error, RestException) or not str(error).startswith("API request to")


def log_points(client: MlflowClient, uri: str, run_id: str, rows: Sequence[Row]) -> None:
    """Write points.

    A tracking server gets them as JSON in MLflow's REST format. MLflow's own client creates an entity, a message and a
    dictionary per point. Training is slower: 1,000 points take 48 ms of a processor, against 5 ms here (RESULTS.md).

    Args:
        client: A client of the store.
        uri: Address of the store.
        run_id: The run.
        rows: The points, at most 1,000.

    Raises:
        MlflowException: MLflow's client raised it.
    """
    if not uri.startswith(("http://", "https://")):
        metrics = [Metric(name, value, milliseconds, step) for name, step, value, milliseconds in rows]
        client.log_batch(run_id, metrics=metrics)
        return
    points = [
        {
            "key": name,
            "value": _NAMED.get(str(value), value),
            "timestamp": milliseconds,
            "step": step,
        }
        for name, step, value, milliseconds in rows
    ]
    credentials = get_default_host_creds(uri)  # type: ignore[no-untyped-call]
    response = http_request(credentials, _ENDPOINT, "POST", json={"run_id": run_id, "metrics": points})  # type: ignore[no-untyped-call]
    verify_rest_response(response, _ENDPOINT)


def absent_rows(client: MlflowClient, run_id: str, rows: Sequence[Row], known_by: str) -> list[Row]:
    """Return points that begin a curve, or at whose steps a run has no value of the metric `known_by`.

    Raises:
        MlflowException: MLflow's client raised it.
    """
    stored = {metric.step for metric in client.get_metric_history(run_id, known_by)}
    curves = client.get_run(run_id).data.metrics
    return [row for row in rows if row[1] not in stored or row[0] not in curves]
