"""What a run gives, shows and refuses; ranks that fail are in `test_runner_failures`, executors in `test_executors`."""

import os
import secrets
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from pipelines.launch import runner as module
from pipelines.launch.driver.rank_output import LogToDriver, RankOutput
from pipelines.launch.horovod_runner import HorovodRunner
from pipelines.launch.rank.process import rank_environment
from pipelines.launch.rank.report import report
from pipelines.launch.runner import Attempt, BarrierRunner
from pipelines.launch.wire.channel import DriverChannel
from pipelines.launch.wire.messages import JsonObject
from tests.patience import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.parallel, pytest.mark.timeout(120)]


def listening_ports() -> dict[int, str]:
    """Ports of this process, and the address that each is open on."""
    return {c.laddr.port: c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


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
    lines, reports = [], []

    def show(rank: int, line: str) -> None:
        lines.append((rank, line))
        if line == "to stderr":
            (tmp_path / f"{rank}-was-heard").touch()

    def function() -> None:
        for number in range(20):
            print("line", number)
        print("to stderr", file=sys.stderr)
        report(progress=0.5)
        wait_until((tmp_path / f"{os.environ['HOROVOD_RANK']}-was-heard").exists)

    BarrierRunner(spark, 2, on_log=show, on_report=reports.append).run(function)
    for rank in (0, 1):
        own = [line for sender, line in lines if sender == rank]
        assert ([line for line in own if line.startswith("line")], own[-1]) == (
            [f"line {number}" for number in range(20)],
            "to stderr",
        )
    assert sorted(report["rank"] for report in reports) == [0, 1]


@pytest.mark.parametrize(("choice", "shown"), [("all", {0, 1}), ("rank0", {0}), ("callback", set()), ("none", set())])
def test_the_choice_of_what_is_shown(tmp_path: Path, choice: LogToDriver, shown: set[int]) -> None:
    seen: list[tuple[int, str]] = []
    listener = RankOutput(choice, lambda rank, line: seen.append((rank, line)), lambda report: None, tmp_path)
    for rank in (0, 1):
        listener.lines(rank, ["printed"])
        listener.shown_line(rank, "told")
    listener.close()
    assert ({rank for rank, line in seen if line == "printed"}, {rank for rank, line in seen if line == "told"}) == (
        shown,
        set() if choice == "none" else {0, 1},
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["printed\ntold\n"] * 2


def test_local_ranks_and_their_driver_meet_on_loopback_only(tmp_path: Path) -> None:
    before, during = listening_ports(), {}

    def function() -> None:
        report(here=True)
        wait_until((tmp_path / "looked").exists)

    def look(report: JsonObject) -> None:
        during.update(listening_ports())
        (tmp_path / "looked").touch()

    BarrierRunner(None, 1, on_report=look).run(function)
    opened = {port: address for port, address in during.items() if port not in before}
    # The channel, the rendezvous and the rank's own probe.
    assert list(opened.values()) == ["127.0.0.1"] * 3
    # The server's thread closes its port a moment later.
    wait_until(lambda: not listening_ports().keys() - before.keys())


@pytest.mark.parametrize(
    ("workers", "gpus", "words"),
    [(3, 0, r"3 workers do not fit 2 slots of local\[2\]"), (1, 1, r"spark\.task\.resource\.gpu\.amount")],
)
def test_what_spark_does_not_offer_is_said_before_anything_starts(
    spark: SparkSession, workers: int, gpus: int, words: str
) -> None:
    attempts: list[Attempt] = []
    with pytest.raises((RuntimeError, ValueError), match=words):
        BarrierRunner(spark, workers, gpus_per_worker=gpus, on_attempt=attempts.append).run(print)
    assert attempts == []


def test_more_workers_than_the_driver_may_have_files_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "allow_open_files", lambda: 1024)
    with pytest.raises(ValueError, match=r"^300 workers need 1100 open files .*, which may have 1024: raise"):
        BarrierRunner(None, 300).run(len, "")


def test_what_cannot_be_pickled_is_refused(spark: SparkSession) -> None:
    with pytest.raises(ValueError, match="cannot be sent to the workers"):
        BarrierRunner(spark, 1).run(print, threading.Lock())


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        (
            "spark.ssl.enabled",
            "true",
            "spark.ssl.enabled=true covers .* not covered: gradients .*accept_unencrypted=True",
        ),
        ("spark.ssl.rpc.enabled", "true", "spark.ssl.rpc.enabled=true covers"),
        ("spark.authenticate", " True", "spark.authenticate=true covers"),  # as Spark reads it
        ("spark.network.crypto.enabled", "true", "spark.network.crypto.enabled=true covers"),
        ("spark.dynamicAllocation.enabled", "TRUE", "spark.dynamicAllocation.enabled=false"),
    ],
)
def test_settings_of_spark_that_do_not_fit_ranks_are_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, setting: str, value: str, words: str
) -> None:
    """By the settings alone: `test_executors` has a session that authenticates."""
    asked = spark.sparkContext.getConf().set(setting, value)
    monkeypatch.setattr(spark.sparkContext, "getConf", lambda: asked)
    with pytest.raises(RuntimeError, match=words):
        BarrierRunner(spark, 1).run(len, "")


def test_ranks_that_never_start_are_named(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(host: str, bind: str) -> DriverChannel:
        channel = DriverChannel(host, bind)
        channel.close()
        return channel

    monkeypatch.setattr(module, "DriverChannel", deaf)
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
        found = [*os.environ.values()]
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                found.append(path.read_bytes().decode(errors="replace"))
        return found

    seen = BarrierRunner(spark, 2, log_folder=tmp_path).run(function)
    assert any("pipelines.launch.rank.rank_main" in text for text in seen)
    text = "".join([*seen, *(path.read_text() for path in tmp_path.iterdir())])
    assert [form for form in (secret.decode(), secret.hex()) if form in text] == []


def test_the_job_has_its_description_in_sparks_page_and_says_when_its_ranks_are_ready(spark: SparkSession) -> None:
    events: list[str] = []
    BarrierRunner(
        spark,
        2,
        description="train spring-2026",
        on_attempt=lambda attempt: events.append(f"starting {attempt.num_workers} workers"),
        on_ready=lambda attempt: events.append("workers ready"),
        on_report=lambda report: events.append("function"),
    ).run(report)
    assert events == ["starting 2 workers", "workers ready", "function", "function"]
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    descriptions = [jobs.apply(number).description() for number in range(jobs.size())]
    assert any("train spring-2026" in str(description) for description in descriptions)


@pytest.mark.parametrize(
    ("inherited", "seen"), [("", "Agg"), ("module://matplotlib_inline.backend_inline", "Agg"), ("svg", "svg")]
)
def test_ranks_draw_without_windows(monkeypatch: pytest.MonkeyPatch, inherited: str, seen: str) -> None:
    monkeypatch.setenv("MPLBACKEND", inherited)
    assert rank_environment(1)["MPLBACKEND"] == seen


CONNECT_SESSION = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
"""A session as the client of Spark Connect makes it, whose own module needs packages that are not installed."""


def test_a_session_of_spark_connect_is_refused_with_what_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"one of Spark Connect.*classic session.*or spark=None for processes"):
        BarrierRunner(CONNECT_SESSION, 2)
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda builder: CONNECT_SESSION)
    with pytest.raises(ValueError, match=r"one of Spark Connect.*HorovodRunner: np=-2"):
        HorovodRunner(np=2).run(print)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"num_workers": 1, "log_to_driver": "some"}, "log_to_driver='some' is not one of all, rank0"),
        ({"num_workers": 1, "retries": -1}, "retries=-1"),
        ({"num_workers": 1, "stop_grace": -1}, "stop_grace=-1"),
        (
            {"num_workers": 2, "spares": True, "env": {"HOROVOD_CYCLE_TIME": "5"}},
            "HOROVOD_CYCLE_TIME=5: where it is set and ranks join again",
        ),
    ],
)
def test_values_out_of_range(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BarrierRunner(None, **arguments)  # type: ignore[arg-type]
