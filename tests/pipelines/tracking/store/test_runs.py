import os
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.tracking import fluent

from pipelines.machine.console import printable
from pipelines.tracking.models.models import model_metadata
from pipelines.tracking.store import queries, runs
from pipelines.tracking.store.experiments import chosen_experiment, experiment_of
from pipelines.tracking.store.recorded import recorded_training, recorded_trainings
from pipelines.tracking.store.served import find_model
from pipelines.tracking.store.store import TrackedRun, TrackingError


def test_an_unknown_run_cannot_be_continued(run: TrackedRun) -> None:
    with pytest.raises(ValueError, match="0123456789abcdef"):
        runs.continue_run("0123456789abcdef")


def test_a_server_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match="MLFLOW_TRACKING_URI"):
        runs.start_run("tests", None, {}, {})


class OtherServer(BaseHTTPRequestHandler):
    """A server that is none of MLflow's, and gives each request the same answer."""

    answer = b""

    def do_GET(self) -> None:
        retries.add(os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.wfile.write(b"HTTP/1.0 " + self.answer)

    do_POST = do_PATCH = do_GET  # noqa: N815


retries: set[str] = set()
"""How often MLflow was to repeat its requests."""


@pytest.fixture(scope="module")
def other_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherServer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://user:SECRET@127.0.0.1:{server.server_port}"
        server.shutdown()


SECRETS = r"\u001b]0;title\u0007\u001b[31m\nhttp://u:SECRET@h/x?token=SECRET"


@pytest.mark.parametrize(
    "answer",
    [
        b"200 OK\r\n\r\n<html>proxy\x1b[31m</html>",
        b"404 Not Found\r\n\r\n<html>proxy\n</html>",
        b"503 Busy\r\n\r\n<html>SECRET</html>",
        b"200 OK\r\n\r\n" + b"[" * 100_000,
        b"200 OK\r\n\r\n" + b'{"run":' * 100_000,
        b"200 OK\r\n\r\n" + bytes(range(256)),
        b"500 Error\r\n\r\n" + bytes(range(256)),
        b'400 Bad\r\n\r\n{"error_code": "INVALID_STATE", "message": "%s"}' % SECRETS.encode(),
        b'400 Bad\r\n\r\n{"error_code": [1], "message": {}}',
        b'200 OK\r\n\r\n{"experiment": 3, "experiments": 3, "run": 3, "runs": 3, "run_info": 3, "model_versions": 3}',
    ],
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda run: runs.check_store("tests"),
        lambda run: runs.start_run("tests", None, {}, {}),
        lambda run: runs.end_run(run, "FINISHED"),
        lambda run: queries.unfinished_runs("tests"),
        lambda run: recorded_trainings("tests", "", children=False, groups=(), metrics=()),
        lambda run: find_model(f"runs:/{run.run_id}/model"),
        lambda run: find_model("models:/name/latest"),
        lambda run: model_metadata(f"runs:/{run.run_id}/model"),
    ],
)
def test_an_answer_that_is_not_mlflows_is_one_line_at_once(
    answer: bytes, ask: Callable[[TrackedRun], object], other_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", other_server)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setattr(OtherServer, "answer", answer)
    run = TrackedRun(other_server, "a" * 32)
    with pytest.raises((ValueError, TrackingError)) as caught:
        ask(run)
    text = str(caught.value)
    assert (printable(text), "\n" in text, "SECRET" in text, retries) == (text, False, False, {"1"})
    assert answer.startswith((b"4", b"5")) or ("127.0.0.1" in text and "tracking.offline=true" in text)
    assert queries.page_of(run) is None


@pytest.mark.parametrize("deleted", ["run", "experiment"])
def test_a_deleted_run_is_no_parent(deleted: str, run: TrackedRun, client: MlflowClient) -> None:
    assert queries.has_run(run)
    getattr(client, f"delete_{deleted}")(getattr(client.get_run(run.run_id).info, f"{deleted}_id"))
    assert (queries.has_run(run), runs.is_known(run.run_id)) == (False, False)


def test_a_sqlite_file_is_found_whatever_its_address_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/new/mlflow.db?timeout=60"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert runs.check_store("tests") == f"{uri}, which the first run creates"
    run = runs.start_run("tests", None, {}, {})
    assert (
        {path.name for path in (tmp_path / "new").iterdir()},
        runs.check_store("tests"),
        experiment_of(run.run_id),
        recorded_training(run.run_id, groups=(), metrics=()).run_id,
    ) == ({"mlflow.db"}, f"{uri} answers", "tests", run.run_id)


def test_a_run_belongs_to_the_active_experiment(client: MlflowClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
        monkeypatch.setenv(name, "")  # MLflow sets one, and both are restored afterwards
        monkeypatch.delenv(name)
    # MLflow's own: `set_experiment` keeps its choice there for ever, and has no public way back.
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    assert chosen_experiment(None) == "groundswell"
    mlflow.set_experiment("of the notebook")
    found = [chosen_experiment(None), chosen_experiment("configured"), chosen_experiment(None, offline=True)]
    assert (found, experiment_of(runs.start_run(chosen_experiment(None), None, {}, {}).run_id)) == (
        ["of the notebook", "configured", "groundswell"],
        "of the notebook",
    )
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "77")
    with pytest.raises(ValueError, match=r"^MLflow's active experiment: .*77"):
        chosen_experiment(None)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    assert (chosen_experiment(None), client.get_experiment_by_name("of the environment")) == (
        "of the environment",
        None,
    )
