"""What a run gives, shows and refuses; ranks that fail are in `test_runner_failures`, executors in `test_executors`."""

import os
import secrets
import threading
import time
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from pipelines.launch import runner as module
from pipelines.launch.horovod_runner import HorovodRunner
from pipelines.launch.messages import JsonObject
from pipelines.launch.runner import Attempt, BarrierRunner

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]


def listening_ports() -> dict[int, str]:
    """Ports of this process, and the address that each is open on."""
    connections = psutil.Process().net_connections("tcp")
    return {c.laddr.port: c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_every_rank_runs_and_rank_zeros_value_comes_back(spark: SparkSession) -> None:
    def function(base: int, *, factor: int) -> tuple[int, str, str, str]:
        size, devices, threads = (
            os.environ[name] for name in ("HOROVOD_SIZE", "CUDA_VISIBLE_DEVICES", "TF_NUM_INTRAOP_THREADS")
        )
        return base + factor * int(os.environ["HOROVOD_RANK"]), size, devices, threads

    runner = BarrierRunner(spark, 2)
    # A thread for the one core that Spark gives a task.
    assert runner.run_all(function, 10, factor=5) == [(10, "2", "-1", "1"), (15, "2", "-1", "1")]
    assert runner.run(function, 1, factor=0) == (1, "2", "-1", "1")


def test_lines_and_reports_reach_the_driver_while_the_ranks_run(spark: SparkSession, tmp_path: Path) -> None:
    lines: list[tuple[int, str]] = []
    reports: list[JsonObject] = []

    def show(rank: int, line: str) -> None:
        lines.append((rank, line))
        if line == "to stderr":
            (tmp_path / f"{rank}-was-heard").touch()

    def function() -> None:
        import sys

        from pipelines.launch.report import report

        for number in range(20):
            print("line", number)
        print("to stderr", file=sys.stderr)
        report(progress=0.5)
        while not (tmp_path / f"{os.environ['HOROVOD_RANK']}-was-heard").exists():
            time.sleep(0.01)

    BarrierRunner(spark, 2, on_log=show, on_report=reports.append).run(function)
    for rank in (0, 1):
        own = [line for sender, line in lines if sender == rank]
        assert [line for line in own if line.startswith("line")] == [f"line {number}" for number in range(20)]
        assert own[-1] == "to stderr"
    assert sorted(report["rank"] for report in reports) == [0, 1]


@pytest.mark.parametrize(("choice", "shown"), [("all", {0, 1}), ("rank0", {0}), ("callback", set()), ("none", set())])
def test_the_choice_of_what_is_shown(tmp_path: Path, choice: str, shown: set[int]) -> None:
    seen: list[tuple[int, str]] = []

    def function() -> None:
        from pipelines.launch.report import log_to_driver

        print("printed")
        log_to_driver("told")

    runner = BarrierRunner(
        None,
        2,
        log_to_driver=choice,  # type: ignore[arg-type]
        log_folder=tmp_path / "logs",
        on_log=lambda rank, line: seen.append((rank, line)),
    )
    runner.run(function)
    assert {rank for rank, line in seen if line == "printed"} == shown
    assert {rank for rank, line in seen if line == "told"} == (set() if choice == "none" else {0, 1})
    for rank in (0, 1):
        assert set((tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()) == {"printed", "told"}


def test_the_whole_log_is_saved_however_long(spark: SparkSession, tmp_path: Path) -> None:
    shown: list[str] = []

    def function() -> None:
        for number in range(100_000):
            print(f"line {number}")

    runner = BarrierRunner(spark, 1, log_folder=tmp_path, on_log=lambda rank, line: shown.append(line))
    runner.run(function)
    assert (tmp_path / "rank-0.log").read_text() == "".join(f"line {number}\n" for number in range(100_000))
    assert len(shown) < 50_000
    assert "lines not shown" in shown[-1]


def test_local_ranks_and_their_driver_meet_on_loopback_only(tmp_path: Path) -> None:
    before = listening_ports()
    during: dict[int, str] = {}

    def function() -> None:
        from pipelines.launch.report import report

        report(here=True)
        while not (tmp_path / "looked").exists():
            time.sleep(0.01)

    def look(report: JsonObject) -> None:
        during.update(listening_ports())
        (tmp_path / "looked").touch()

    BarrierRunner(None, 1, on_report=look).run(function)
    opened = {port: address for port, address in during.items() if port not in before}
    # The channel, the rendezvous and the rank's own probe.
    assert list(opened.values()) == ["127.0.0.1"] * 3
    while listening_ports().keys() - before.keys():  # the server's thread closes its port a moment later
        time.sleep(0.05)


def test_more_workers_than_slots_is_said_before_anything_starts(spark: SparkSession) -> None:
    attempts: list[Attempt] = []
    with pytest.raises(RuntimeError, match=r"3 workers do not fit 2 slots of local\[2\]"):
        BarrierRunner(spark, 3, on_attempt=attempts.append).run(print)
    assert attempts == []


def test_gpus_that_spark_does_not_offer_are_named_with_the_setting(spark: SparkSession) -> None:
    with pytest.raises(RuntimeError, match=r"spark\.task\.resource\.gpu\.amount"):
        BarrierRunner(spark, 1, gpus_per_worker=1).run(print)


def test_more_workers_than_the_driver_may_have_files_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "allow_open_files", lambda: 1024)
    with pytest.raises(ValueError, match=r"^300 workers need 1100 open files .*, which may have 1024: raise"):
        BarrierRunner(None, 300).run(len, "")


def test_what_cannot_be_pickled_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="cannot be sent to the workers"):
        BarrierRunner(spark, 1).run(print, threading.Lock())


@pytest.mark.parametrize("value", ["true", " True"])  # as Spark reads it
@pytest.mark.parametrize(
    "setting", ["spark.ssl.enabled", "spark.ssl.rpc.enabled", "spark.authenticate", "spark.network.crypto.enabled"]
)
def test_encryption_that_does_not_reach_the_ranks_is_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    """By the settings alone: `test_executors` has a session that authenticates."""
    asked = spark.sparkContext.getConf().set(setting, value)
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: asked)
    with pytest.raises(
        RuntimeError, match=rf"{setting}=true covers .* not covered: gradients .*accept_unencrypted=True"
    ):
        BarrierRunner(spark, 1).run(len, "")


def test_dynamic_allocation_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spark.sparkContext.getConf().set("spark.dynamicAllocation.enabled", "TRUE")
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: asked)
    with pytest.raises(RuntimeError, match=r"spark\.dynamicAllocation\.enabled=false"):
        BarrierRunner(spark, 1).run(len, "")


def test_ranks_that_never_start_are_named(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.launch.channel.DriverChannel._accept", lambda self: None)
    with pytest.raises(
        RuntimeError, match=r"2 of 2 tasks have not reached the driver at 127\.0\.0\.1:\d+ after start_timeout=1"
    ):
        BarrierRunner(spark, 2, start_timeout=1).run(print)


def test_neither_arguments_nor_logs_nor_the_environment_hold_the_secret(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = b"0123456789abcdefghijklmnopqrstuv"
    monkeypatch.setattr(secrets, "token_bytes", lambda size: secret)

    def function() -> list[str]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found.append(path.read_bytes().decode(errors="replace"))
            except OSError:
                continue
        return [*found, *os.environ.values()]

    seen = BarrierRunner(spark, 2, log_folder=tmp_path).run(function)
    assert any("pipelines.launch.rank_main" in text for text in seen)
    logs = "".join(path.read_text() for path in tmp_path.iterdir()) if any(tmp_path.iterdir()) else ""
    for form in (secret.decode(), secret.hex()):
        assert form not in "".join(seen) + logs


def test_the_job_has_its_description_in_sparks_page_and_says_when_its_ranks_are_ready(spark: SparkSession) -> None:
    events: list[str] = []

    def function() -> None:
        from pipelines.launch.report import report

        report()

    BarrierRunner(
        spark,
        2,
        description="train spring-2026",
        on_attempt=lambda attempt: events.append(f"starting {attempt.num_workers} workers"),
        on_ready=lambda attempt: events.append("workers ready"),
        on_report=lambda report: events.append("function"),
    ).run(function)
    assert events == ["starting 2 workers", "workers ready", "function", "function"]
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    descriptions = [jobs.apply(number).description() for number in range(jobs.size())]
    assert any("train spring-2026" in str(description) for description in descriptions)


@pytest.mark.parametrize(
    ("inherited", "given", "seen"),
    [
        (None, {}, "Agg"),
        ("module://matplotlib_inline.backend_inline", {}, "Agg"),
        ("svg", {}, "svg"),
        ("svg", {"MPLBACKEND": "pdf"}, "pdf"),
    ],
)
def test_ranks_draw_without_windows(
    monkeypatch: pytest.MonkeyPatch, inherited: str | None, given: dict[str, str], seen: str
) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)
    if inherited is not None:
        monkeypatch.setenv("MPLBACKEND", inherited)
    assert BarrierRunner(None, 1, env=given).run(os.getenv, "MPLBACKEND") == seen


def connect_session() -> object:
    """A session as the client of Spark Connect makes it, whose own module needs packages that are not installed."""
    return type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()


def test_a_session_of_spark_connect_is_refused_with_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"one of Spark Connect.*classic session.*or spark=None for processes"):
        BarrierRunner(connect_session(), 2)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda builder: connect_session())
    with pytest.raises(ValueError, match=r"one of Spark Connect.*HorovodRunner: np=-2"):
        HorovodRunner(np=2).run(print)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": 1, "log_to_driver": "some"}, "log_to_driver='some' is not one of all, rank0"),
        ({"num_workers": 1, "retries": -1}, "retries=-1"),
        ({"num_workers": 1, "stop_grace": -1}, "stop_grace=-1"),
    ],
)
def test_values_out_of_range(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BarrierRunner(None, **arguments)  # type: ignore[arg-type]
