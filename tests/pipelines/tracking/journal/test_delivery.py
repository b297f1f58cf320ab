"""A real MLflow server, which is killed and started again once."""

import base64
import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import keras
import pytest
from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.entities import Metric

from pipelines.tracking.journal import delivery
from pipelines.tracking.journal.delivery import News
from pipelines.tracking.journal.writer import Point, RunWriter, now
from pipelines.tracking.models.model_metadata import ModelMetadata
from pipelines.tracking.models.models import log_model, model_metadata
from pipelines.tracking.store.runs import end_run, start_run
from pipelines.tracking.store.store import TrackedRun, TrackingError, tracking_uri, worker_environment
from tests.patience import patient

if TYPE_CHECKING:
    from outages.server import Door, Server

TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
pytestmark = pytest.mark.timeout(280)


class Told:
    """What a writer was told, and a way to wait for it."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.reasons: list[str] = []
        self._changed = threading.Condition()

    def __call__(self, news: News, reason: str) -> None:
        with self._changed:
            self.news.append(news)
            self.reasons.append(reason)
            self._changed.notify_all()

    def wait_for(self, news: News) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: news in self.news, timeout=patient(120)), self.news


@pytest.fixture
def run(server: "Server") -> TrackedRun:
    return start_run("tests", None, {}, {})


@pytest.fixture
def stored(server: "Server") -> MlflowClient:
    """The server's store, whatever is in between."""
    return MlflowClient(server.uri)


def as_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in worker_environment().items():
        monkeypatch.setenv(name, value)


def curve(client: MlflowClient, run: TrackedRun, name: str = "train/loss") -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.run_id, name)]


@pytest.mark.parametrize("place", ["address", "variables"])
def test_a_password_with_slashes_arrives_with_every_request(
    door: "Door", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    if place == "address":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", door.uri.replace("//", "//me:p@ss/w%6Frd%@"))
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p@ss/word%")
    run = start_run("tests", None, {}, {})
    assert run.uri == tracking_uri() == worker_environment()["MLFLOW_TRACKING_URI"]
    writer = RunWriter(run, tmp_path / "journal")
    writer.metrics({"train/loss": 0.5}, step=1)
    writer.text("a text", "notes.txt")
    assert writer.drain() == ""
    writer.close()
    end_run(run, "FINISHED")
    assert any("artifacts" in request.path for request in door.answered)
    assert {request.authorization for request in door.answered} == {
        f"Basic {base64.b64encode(b'me:p@ss/word%').decode()}"
    }


def test_a_write_that_the_server_took_before_it_died_is_not_doubled(
    run: TrackedRun, stored: MlflowClient, writer: RunWriter
) -> None:
    points = [Point(step, 0.5, now() + step) for step in range(3)]
    # The server took the points, and its answer was lost.
    stored.log_batch(run.run_id, metrics=[Metric("train/loss", p.value, p.milliseconds, p.step) for p in points])
    writer.curves({"train/loss": points})
    assert (writer.drain(), curve(stored, run)) == ("", [(0, 0.5), (1, 0.5), (2, 0.5)])


def test_every_number_arrives_as_it_is(run: TrackedRun, stored: MlflowClient, writer: RunWriter) -> None:
    values = [0.1, -3.0, 1e300, 5e-324, 2**53 - 1.0, float("inf"), float("-inf")]
    points = [Point(step, value, now() + step) for step, value in enumerate([*values, float("nan")])]
    writer.curves({"train/loss": points})
    assert writer.drain() == ""
    found = stored.get_metric_history(run.run_id, "train/loss")
    # MLflow's databases have no infinity: they keep the largest float in its place.
    largest = sys.float_info.max
    assert ([metric.value for metric in found[:-1]], [(metric.step, metric.timestamp) for metric in found]) == (
        [min(max(value, -largest), largest) for value in values],
        [(each.step, each.milliseconds) for each in points],
    )


def test_a_write_that_the_server_refuses_is_told_of_and_does_not_stop_the_others(
    run: TrackedRun, stored: MlflowClient, tmp_path: Path
) -> None:
    told = Told()
    writer = RunWriter(run, tmp_path / "journal", on_news=told)
    for name in ("system/rank-0/no such name: 100 %", "system/rank-0/not this one either?", "train/loss"):
        writer.metrics({name: 1.0}, step=1)
    assert (writer.drain(), told.news, curve(stored, run)) == ("", ["refused"], [(1, 1.0)])


def test_a_file_that_a_proxy_never_takes_is_told_of_and_does_not_stop_the_others(
    door: "Door", stored: MlflowClient, tmp_path: Path
) -> None:
    door.largest_file = 1000
    run, told = start_run("tests", None, {}, {}), Told()
    writer = RunWriter(run, tmp_path / "journal" / "driver", on_news=told)
    for name in ("traces", "elsewhere", "refused"):
        (tmp_path / name).mkdir()
    (tmp_path / "traces" / "trace.pb").write_bytes(bytes(2000))
    (tmp_path / "refused" / "link").symlink_to(tmp_path / "elsewhere")
    for path in ("report.html", "plots/wide.png", "link/outside.png"):
        writer.data(bytes(2000), path)
    writer.folder(tmp_path / "traces", "traces")
    writer.data(bytes(10), "small.bin")
    writer.metrics({"train/loss": 1.0}, step=1)
    assert writer.drain() == ""
    assert [(news, reason.partition(": ")[0]) for news, reason in zip(told.news, told.reasons, strict=True)] == [
        ("refused", "report.html"),
        ("refused", "plots/wide.png"),
        ("refused", "link/outside.png"),
        ("refused", "traces"),
    ]
    assert "413" in told.reasons[0]
    writer.close()
    kept = ["refused/report.html", "refused/plots/wide.png"]
    assert [reason.rpartition("; it is kept in the run's folder as ")[2] for reason in told.reasons[:2]] == kept
    assert ([(tmp_path / path).stat().st_size for path in kept], "kept" in told.reasons[2]) == ([2000, 2000], False)
    assert not [*(tmp_path / "elsewhere").iterdir(), *(tmp_path / "journal").iterdir()]
    assert ([item.path for item in stored.list_artifacts(run.run_id)], curve(stored, run)) == (
        ["small.bin"],
        [(1, 1.0)],
    )


@pytest.mark.long
def test_a_file_has_more_time_than_a_small_write(
    door: "Door", stored: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = int(patient(2))
    monkeypatch.setattr(delivery, "TIMEOUT_OF_THREAD", short)
    run, told = start_run("tests", None, {}, {}), Told()
    as_in_a_rank(monkeypatch)
    monkeypatch.delenv(TIMEOUT, raising=False)
    (tmp_path / "profiles").mkdir()
    for name in ("profiles/trace.pb", "model.keras"):
        (tmp_path / name).write_bytes(b"x")
    rank = RunWriter(run, tmp_path / "journal", on_news=told)
    rank.start()
    door.seconds_of_a_file = patient(5.0)
    rank.folder(tmp_path / "profiles", "profiles")
    assert rank.drain() == ""
    with rank.upload_waits():
        MlflowClient(run.uri).log_artifact(run.run_id, str(tmp_path / "model.keras"))
    assert os.environ[TIMEOUT] == str(short)
    rank.close()
    assert TIMEOUT not in os.environ
    assert (told.news, {item.path for item in stored.list_artifacts(run.run_id)}) == ([], {"profiles", "model.keras"})


def test_a_store_that_is_away_when_the_model_is_logged_costs_no_password_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://bob:TOPSECRET@127.0.0.1:9")
    caplog.set_level(logging.INFO)
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    with pytest.raises(TrackingError, match="API request to") as caught:
        log_model(TrackedRun(tracking_uri(), "a" * 32), model, ModelMetadata(("x",)), None, step=8)
    assert "TOPSECRET" not in str(caught.value) + caplog.text
    assert "MLflow did not take the model: Traceback" in caplog.text


@pytest.mark.long
def test_an_outage_delays_nothing_loses_nothing_and_doubles_nothing(
    server: "Server", stored: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, driven, ended = (start_run("tests", None, {}, {}) for _ in range(3))
    before = dict(os.environ)
    as_in_a_rank(monkeypatch)
    told, told_driver = Told(), Told()
    rank = RunWriter(trained, tmp_path / "rank", on_news=told)
    rank.start()
    rank.metrics({"train/loss": 3.0, "val/f1_micro": float("nan")}, step=1)
    assert rank.drain() == ""

    server.kill()
    # Training: none of these waits for the server.
    started = now()
    for step in range(2, 10):
        rank.curves({"train/loss": [Point(step, 1.0 / step, started + step)]})
    rank.table([{"class": "x", "f1": float("nan")}], "per_class.json")
    rank.figure(Figure(), "plots/curves.png")
    rank.tags({"attempt": "2"})
    told.wait_for("away")
    # The end of a training whose server stays away.
    left = RunWriter(ended, tmp_path / "left")
    left.start()
    left.metrics({"val/loss": 0.25}, step=8)
    assert left.drain(patience=0.5)
    left.close()
    with pytest.raises(TrackingError):
        log_model(ended, keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), ModelMetadata(), None, step=8)
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_URI"):
        model_metadata(f"runs:/{ended.run_id}/model")
    # The driver, whose environment is a notebook's.
    for name in os.environ.keys() - before.keys():
        monkeypatch.delenv(name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("step 0")
    driver = RunWriter(driven, tmp_path / "driver", on_news=told_driver)
    driver.tags({"attempt": "1"})
    driver.folder(tmp_path / "logs", "logs")
    assert "127.0.0.1" in driver.drain(patience=0)
    with pytest.raises(TrackingError):
        end_run(driven, "FINISHED")
    with pytest.raises(TrackingError, match="MLFLOW_TRACKING_URI"):
        start_run("tests", None, {}, {})
    assert dict(os.environ) == before

    server.start()
    told.wait_for("back")
    assert rank.drain(patience=patient(60)) == ""
    rank.close()
    assert (told.news, (tmp_path / "rank").exists(), curve(stored, trained)) == (
        ["away", "back"],
        False,
        [(1, 3.0), *[(step, 1.0 / step) for step in range(2, 10)]],
    )
    assert stored.get_run(trained.run_id).data.tags["attempt"] == "2"
    assert {item.path for item in stored.list_artifacts(trained.run_id)} == {"per_class.json", "plots"}
    assert [item.path for item in stored.list_artifacts(trained.run_id, "plots")] == ["plots/curves.png"]

    assert (RunWriter(ended, tmp_path / "left").drain(), curve(stored, ended, "val/loss")) == ("", [(8, 0.25)])

    assert (driver.drain(), told_driver.news) == ("", ["away", "back"])
    assert [item.path for item in stored.list_artifacts(driven.run_id, "logs")] == ["logs/rank-0.log"]
    assert stored.get_run(driven.run_id).data.tags["attempt"] == "1"
