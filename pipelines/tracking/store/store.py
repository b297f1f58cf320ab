"""MLflow's store: its address, who can reach it, and how long a call waits for it."""

import logging
import os
import re
import sqlite3
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.parse import quote, unquote

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException, RestException

from pipelines.machine.console import printable
from pipelines.storage.locations import redacted
from pipelines.tracking.store import databricks

# MLflow would show a progress bar for each small file that it loads, between the lines of a job.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# MLflow would print the addresses of run and experiment, which a job prints itself.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# The text after the colon is not a password if it is a port and a path.
_HTTP_CREDENTIALS = re.compile(r"(https?://)([^:/\[]*):(?!\d*[/?#])(.*)@([^@/?#]+[^@]*)", re.IGNORECASE | re.DOTALL)
_QUOTED = re.compile("(%[0-9A-Fa-f]{2})")
# The cause is at the end of a long message about a request that failed.
_CAUSE = re.compile(r"Connection refused|timed out|Name or service not known|No route to host|Connection reset by peer")
_ADDRESS = "MLFLOW_TRACKING_URI"
_READS_ANSWERS = ("mlflow.", "google.protobuf.")
"""Packages whose own errors come from JSON that is no answer of MLflow."""
_RETRIES, _TIMEOUT = "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"
_log = logging.getLogger(__name__)


class TrackingError(RuntimeError):
    """The error when the store does not answer, or refuses data that a run needs."""


@dataclass(frozen=True)
class TrackedRun:
    """A run and its store; it is small, and sent to the workers."""

    uri: str = field(repr=False)
    """Address of the store, which may contain a password; empty if training runs without a store."""
    run_id: str

    @property
    def is_offline(self) -> bool:
        """Whether nothing is written to a store for now."""
        return not self.uri


def tracking_uri() -> str:
    """Return the store that MLflow itself uses, so that a user's own client finds our runs.

    This is the one of `mlflow.set_tracking_uri` or `MLFLOW_TRACKING_URI`, else the workspace on Databricks, else
    MLflow's default in this folder: a file `mlflow.db`, or `mlruns/` in older versions of MLflow. Runs in our own
    earlier default are named. A relative path of a sqlite file or a folder becomes absolute, because workers have
    another working directory. User and password of an HTTP address, up to its last `@`, are quoted if necessary; a
    path must write `@` as `%40`. Each `%XX` stays.

    Raises:
        ValueError: The address is one of a registry, such as `databricks-uc`.
    """
    uri = str(mlflow.get_tracking_uri())
    if not mlflow.is_tracking_uri_set():  # type: ignore[no-untyped-call]
        uri = databricks.URI if databricks.is_in_runtime() else uri
        _name_earlier_store(uri, Path("mlruns/mlflow.db").absolute())
    databricks.refuse_registry(uri)
    scheme, separator, path = uri.partition(":///")
    if separator and scheme.startswith("sqlite") and path and not path.startswith(("/", ":memory:")):
        return f"{scheme}:///{Path(path).absolute()}"
    if ":" not in uri and uri != databricks.URI:
        return Path(uri).absolute().as_uri()
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return Path(unquote(uri.removeprefix("file:"))).absolute().as_uri()
    return _HTTP_CREDENTIALS.sub(_with_quoted_credentials, uri)


@cache
def _name_earlier_store(used: str, earlier: Path) -> None:
    """Log, once for each folder, that our earlier default store has runs, and how to keep it."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{earlier.as_uri()}?mode=ro", uri=True)) as database:
        if database.execute("SELECT 1 FROM runs LIMIT 1").fetchone():
            _log.warning(
                "%s has runs, and the store is %s now, as in MLflow itself: to keep the earlier one, set %s=sqlite:///%s",
                earlier, used, _ADDRESS, earlier,
            )  # fmt: skip


def quote_environment(uri: str) -> None:
    """Write an address from `tracking_uri` back to `MLFLOW_TRACKING_URI` if the variable has it unquoted.

    MLflow 3.0 and older send files to the address in the environment instead of the client's address.
    """
    if os.environ.get(_ADDRESS) and tracking_uri() == uri:
        os.environ[_ADDRESS] = uri


def _with_quoted_credentials(address: re.Match[str]) -> str:
    """Return an address with quoted credentials: for some parsers, a slash in a password would end the host."""
    scheme, user, password, rest = address.groups()
    return f"{scheme}{_quoted(user)}:{_quoted(password)}@{rest}"


def _quoted(text: str) -> str:
    return "".join(part if _QUOTED.fullmatch(part) else quote(part, safe="") for part in _QUOTED.split(text))


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a store in sqlite, whose address may end with a query, `?timeout=60`; None: another store."""
    scheme, separator, path = uri.partition(":///")
    return Path(unquote(path.partition("?")[0])) if separator and scheme.startswith("sqlite") else None


def local_store(uri: str) -> Path | None:
    """Return the absolute path of a store in a sqlite file or a folder; None: another store."""
    return Path("/", sqlite_file(uri) or unquote(uri.removeprefix("file:"))) if is_file_store(uri) else None


def is_new(uri: str) -> bool:
    """Return whether a store in a file or folder does not exist yet: MLflow would create it to answer a question."""
    path = local_store(uri)
    return path is not None and not path.exists()


def check_writable(uri: str) -> None:
    """Refuse a store in a file or folder that this process cannot write; other stores are not checked yet.

    Raises:
        RuntimeError: The store cannot be written; the text says which path.
    """
    path = local_store(uri)
    if path is None:
        return
    existing = path if path.exists() else next(parent for parent in path.parents if parent.exists())
    # SQLite creates a journal beside its file.
    for needed in {existing, existing.parent if existing.is_file() else existing}:
        if not os.access(needed, os.W_OK | (os.X_OK if needed.is_dir() else 0)):
            missing = "" if path.exists() else " does not exist, and"
            raise RuntimeError(f"MLflow's store {redacted(uri)}{missing} cannot be written: see the rights of {needed}")


def worker_environment() -> dict[str, str]:
    """Return the address and credentials that a worker needs to write to the driver's store.

    A rank repeats a failed request itself, from a thread, so MLflow's own retries would only delay the news.
    """
    settings = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    uri, registry = tracking_uri(), mlflow.get_registry_uri()
    if databricks.is_databricks(uri) and registry != uri:  # set by the notebook: `databricks-uc` is Unity Catalog
        settings["MLFLOW_REGISTRY_URI"] = registry
    return {_RETRIES: "2", **settings, **databricks.worker_credentials(uri), _ADDRESS: uri}


def is_file_store(uri: str) -> bool:
    """Return whether only this machine can write to a store."""
    return not uri.startswith("databricks") and ("://" not in uri or uri.startswith(("sqlite", "file:")))


def check_workers_reach(uri: str, spark_master: str | None) -> None:
    """Refuse a store that only the driver's machine can use if workers run on other machines.

    Raises:
        RuntimeError: The store is a file and the Spark master is not a local one.
    """
    if is_file_store(uri) and not str(spark_master).startswith("local"):
        raise RuntimeError(
            f"MLflow's store {redacted(uri)} is a file of the driver's machine, and the workers run on others: set "
            "MLFLOW_TRACKING_URI to a tracking server"
        )


def runs_client(uri: str) -> MlflowClient:
    """Return a client for runs, which works without Spark.

    MLflow would ask the Spark session for a registry, and fail if the session's JVM has ended.
    """
    return MlflowClient(uri, registry_uri=uri)


def show_command(run: TrackedRun) -> str:
    """Return the command that shows a run."""
    if run.uri.startswith(("http://", "https://")):
        return f"open {redacted(run.uri)}"
    if databricks.is_databricks(run.uri):
        return "see the page of the run in the workspace"
    project = Path(__file__).parents[3]
    is_default = not mlflow.is_tracking_uri_set() and run.uri == tracking_uri()  # type: ignore[no-untyped-call]
    if is_default and project == Path.cwd() and (project / "Makefile").is_file():
        return "make ui"
    return f"mlflow ui --host 127.0.0.1 --backend-store-uri {redacted(run.uri)}"


@contextmanager
def short_waits(timeout: int = 5, retries: int = 1) -> Iterator[None]:
    """Make each of MLflow's calls give up soon during the block, unless the environment says otherwise.

    The environment is restored at the end, because it may be that of a user's notebook.

    Args:
        timeout: Seconds that one request may take.
        retries: Number of further requests of a call.
    """
    wanted = {_RETRIES: str(retries), _TIMEOUT: str(timeout)}
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    retries_log = logging.getLogger("urllib3.connectionpool")
    level = retries_log.level
    os.environ.update(ours)
    retries_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        retries_log.setLevel(level)
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Turn MLflow's errors into one line: TrackingError if no store answers, else ValueError about `what`."""
    try:
        yield
    except MlflowException as error:
        reason = reason_of(error)
        if reason.startswith("API request to endpoint"):  # the answer of a proxy or of another program
            raise _no_server(reason) from None
        if not isinstance(error, RestException) and reason.startswith("API request to"):
            cause = _CAUSE.search(str(error))
            raise TrackingError(
                f"no answer from MLflow at {redacted(tracking_uri())} ({reason if cause is None else cause[0]}): see "
                "MLFLOW_TRACKING_URI, or train without MLflow, with --set tracking.offline=true"
            ) from None
        raise ValueError(f"{redacted(what)}: {reason}") from None
    except Exception as error:
        # MLflow 2 does not convert errors of its database, such as a missing file.
        if type(error).__module__.startswith("sqlalchemy."):
            raise ValueError(f"{redacted(what)}: MLflow's store cannot be opened: {reason_of(error)}") from None
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if is_file_store(tracking_uri()) or not frame.f_globals["__name__"].startswith(_READS_ANSWERS):
            raise
        raise _no_server(reason_of(error)) from None


def _no_server(reason: str) -> TrackingError:
    return TrackingError(
        f"{redacted(tracking_uri())} does not answer as an MLflow server: set MLFLOW_TRACKING_URI to one, or train "
        f"with tracking.offline=true ({reason})"
    )


def reason_of(error: Exception) -> str:
    """Return an error's first line, printable and without secrets."""
    return printable(redacted((str(error).splitlines() or [type(error).__name__])[0]))[:300]
