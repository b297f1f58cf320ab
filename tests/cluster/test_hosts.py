"""The launcher on several hosts: real Spark daemons, real links, one network namespace each, one session for all."""

import hmac
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pyspark.sql import SparkSession

from pipelines.launch import runner
from pipelines.launch.driver import preflight
from pipelines.launch.driver.placement import place
from pipelines.launch.rank.report import attempt, report, step_done
from pipelines.launch.runner import BarrierRunner
from pipelines.launch.wire import rendezvous
from pipelines.launch.wire.channel import DriverChannel
from pipelines.launch.wire.rendezvous import RendezvousServer
from tests.patience import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(280)]
RANKS = 3
"""Two on the first host, one on the second."""


def session(host: str) -> SparkSession:
    """The session of the Python in which all runs are: each run has new processes on the executors."""
    builder = SparkSession.builder.master(f"spark://{host}:7077").config("spark.python.worker.reuse", "false")
    addresses = {"spark.driver.host": host, "spark.driver.bindAddress": host, "spark.ui.enabled": "false"}
    return builder.config(map=dict(addresses)).getOrCreate()


def ring() -> tuple[str, list[float], tuple[int, ...]]:
    """Where this rank is, a sum over all ranks, and its place among them."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.constant([1.0, hvd.rank() + 1.0]), op=hvd.Sum)
    numbers = (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return socket.gethostbyname(socket.gethostname()), total.numpy().tolist(), numbers


def run_ring(host: str) -> list[Any]:
    return BarrierRunner(session(host), RANKS, log_to_driver="none").run_all(ring)


def test_a_ring_over_uneven_hosts(cluster: Any) -> None:
    ranks = cluster.call(run_ring, cluster.address(1))
    hosts = [host for host, *_ in ranks]
    assert (sorted(hosts.count(cluster.address(host)) for host in (1, 2)), [total for _, total, _ in ranks]) == (
        [1, 2],
        [[3.0, 6.0]] * RANKS,
    )
    # `test_placement` compares this with Horovod's own plan; it numbers the ranks of a host one after the other.
    expected = [(p.rank, p.local_rank, p.local_size, p.cross_rank, p.cross_size) for p in place(hosts)]
    assert ([numbers for *_, numbers in ranks], [rank for rank, *_ in expected]) == (expected, list(range(RANKS)))


def error_of(host: str) -> str:
    """What a run on both hosts fails with."""
    try:
        return str(BarrierRunner(session(host), RANKS, log_to_driver="none").run(len, ""))
    except RuntimeError as error:
        return str(error)


def test_a_loopback_hostname_is_refused_before_anything_starts(cluster: Any) -> None:
    name = socket.gethostname()
    cluster.set_hosts(2, f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    try:
        error = cluster.call(error_of, cluster.address(1))
    finally:
        cluster.set_hosts(2, f"127.0.0.1 localhost\n{cluster.address(2)} {name}\n")
    assert f"host {cluster.address(2)} resolves its own name '{name}' to 127.0.1.1" in error
    assert f"map '{name}' to {cluster.address(2)} in its /etc/hosts" in error


def test_different_versions_on_the_hosts_are_refused(cluster: Any) -> None:
    other = cluster.folder / "host2" / "horovod-0.27.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.27.0\n")
    try:
        error = cluster.call(error_of, cluster.address(1))
    finally:
        (other / "METADATA").unlink()
        other.rmdir()
    assert "ranks have different versions of horovod" in error
    assert f"0.27.0 on {cluster.address(2)}" in error


def flood(address: str, ports: Sequence[int], requests: int) -> dict[str, int]:
    """From a host that has no part in the job: without the secret, with a wrong one, as HTTP; what came of it."""
    answers = {"refused": 0, "answered": 0}
    for number in range(requests):
        port = ports[number % len(ports)]
        try:
            with socket.create_connection((address, port), 5) as stranger:
                match number % 3:
                    case 0:
                        nonce, own = stranger.recv(32), secrets.token_bytes(32)
                        stranger.sendall(own + hmac.digest(secrets.token_bytes(32), b"client" + nonce + own, "sha256"))
                    case 1:
                        stranger.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 1\r\n\r\nx")
                    case 2:
                        stranger.sendall(b'{"kind": "exit", "task": 0}\n')
                stranger.shutdown(socket.SHUT_WR)
                data = b""
                while part := stranger.recv(1 << 12):
                    data += part
                # The channel's nonce is all that a stranger ever gets to see.
                answers["answered" if len(data) > 32 else "refused"] += 1
        except OSError:
            answers["refused"] += 1
    return answers


def run_and_tell_ports(host: str, folder: str) -> tuple[int, list[str]]:
    """A run that lasts until strangers are done; how many were refused, and who was not."""
    channels, servers = [], []
    lines, reports = [], []

    def channel(host: str, bind: str) -> DriverChannel:
        channels.append(DriverChannel(host, bind))
        return channels[-1]

    def server(*args: object, **options: object) -> RendezvousServer:
        servers.append(RendezvousServer(*args, **options))
        (Path(folder) / "ports.tmp").write_text(f"{channels[-1].address.port} {servers[-1].server_port}")
        (Path(folder) / "ports.tmp").rename(Path(folder) / "ports")
        return servers[-1]

    def work() -> int:
        number = 0
        while not (Path(folder) / "flooded").exists():
            number += 1
            print("line", number)
            report(number=number)
            time.sleep(0.01)
        return number

    with patch.object(runner, "DriverChannel", channel), patch.object(rendezvous, "RendezvousServer", server):
        numbers = BarrierRunner(
            session(host),
            RANKS,
            on_log=lambda rank, line: lines.append(line) if rank == 0 else None,
            on_report=lambda message: reports.append(message["number"]) if message["rank"] == 0 else None,
        ).run_all(work)
    assert reports == list(range(1, numbers[0] + 1)), "reports were lost or out of order"
    assert [line for line in lines if line.startswith("line")] == [f"line {n + 1}" for n in range(numbers[0])]
    assert servers[-1].get("global", "0") is None, "a stranger wrote to the rendezvous"
    return channels[-1]._server.refused, sorted(channels[-1].peers)


def test_strangers_of_another_host_are_refused_while_a_job_runs(cluster: Any, tmp_path: Path) -> None:
    """10,000 bad requests to both ports from a third host."""
    answers: list[dict[str, int]] = []

    def attack() -> None:
        with suppress(AssertionError, FileNotFoundError):
            wait_until((tmp_path / "ports").exists)
            ports = [int(port) for port in (tmp_path / "ports").read_text().split()]
            answers.append(cluster.call(flood, cluster.address(1), ports, 10_000, host=3))
        (tmp_path / "flooded").touch()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(attack)
        refused, peers = cluster.call(run_and_tell_ports, cluster.address(1), str(tmp_path))
    assert answers == [{"refused": 10_000, "answered": 0}]
    assert refused >= 4_900
    assert peers == [cluster.address(1), cluster.address(2)]


def train_until_lost(host: str, folder: str) -> tuple[str, str]:
    """Train for ever on both hosts, then on what is left: the value, and the first attempt's error."""
    logging.basicConfig(level=logging.INFO)
    errors: list[str] = []
    logging.getLogger("pipelines.launch.runner").addFilter(lambda record: errors.append(record.getMessage()) or True)
    preflight.REGISTRATION_SECONDS = 5.0  # executors of the host that is lost will not come back

    def work() -> str:
        (Path(folder) / f"started-{attempt()}-{os.environ['HOROVOD_RANK']}").touch()
        while attempt() == 1:
            time.sleep(0.2)
            step_done()
        return f"attempt {attempt()} with {os.environ['HOROVOD_SIZE']} ranks"

    runner = BarrierRunner(
        session(host), RANKS, retries=1, retry_wait=0.1, allowed_sizes=[1, 2, 3], log_to_driver="none"
    )
    return runner.run(work), errors[0]


def test_a_host_that_is_cut_off_is_named_and_the_rest_continues(cluster: Any, tmp_path: Path) -> None:
    """Last: Spark drops the worker of that host."""

    def cut_off_when_started() -> None:
        wait_until(lambda: len(list(tmp_path.glob("started-1-*"))) == RANKS, 150)
        time.sleep(1.0)
        cluster.link(2, "down")

    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(cut_off_when_started)
            value, error = cluster.call(train_until_lost, cluster.address(1), str(tmp_path))
    finally:
        cluster.link(2, "up")
    assert f"on {cluster.address(2)} failed: lost: neither its Spark task nor its host answers" in error
    assert value == "attempt 2 with 2 ranks"
