"""The launcher on several hosts: real Spark daemons, real links, one network namespace each."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.parallel, pytest.mark.long, pytest.mark.timeout(280)]


@contextmanager
def session(master: str, host: str) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", host).config("spark.driver.bindAddress", host)
    spark = builder.getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def ring() -> tuple[str, list[float], dict[str, str]]:
    """A sum over all ranks, and where this one was."""
    import socket

    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    total = hvd.allreduce(tf.constant([1.0, hvd.rank() + 1.0]), op=hvd.Sum)
    place = (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    names = ("rank", "local_rank", "local_size", "cross_rank", "cross_size")
    return (
        socket.gethostbyname(socket.gethostname()),
        [float(value) for value in total.numpy()],
        {name: str(value) for name, value in zip(names, place, strict=True)},
    )


def run_ring(master: str, host: str, ranks: int) -> list[Any]:
    from pipelines.launch.runner import BarrierRunner

    with session(master, host) as spark:
        return BarrierRunner(spark, ranks, log_to_driver="none").run_all(ring)


@pytest.mark.parametrize("slots", [(2, 2), (3, 1)])
def test_a_ring_over_even_and_uneven_hosts(
    make_cluster: Callable[[Sequence[int]], Any], slots: tuple[int, int]
) -> None:
    cluster = make_cluster(slots)
    try:
        ranks = cluster.call(run_ring, cluster.master, cluster.address(1), 4)
    finally:
        cluster.close()
    assert [total for _, total, _ in ranks] == [[4.0, 10.0]] * 4
    assert [place["rank"] for _, _, place in ranks] == ["0", "1", "2", "3"]
    hosts = [host for host, _, _ in ranks]
    sizes = {host: hosts.count(host) for host in hosts}
    assert sorted(sizes.values()) == sorted(slots)
    assert hosts == sorted(hosts, key=hosts.index), "ranks of a host are not contiguous"
    for host, _, place in ranks:
        assert int(place["local_size"]) == sizes[host]
        peers = [other for other in sizes if sizes[other] > int(place["local_rank"])]
        assert (int(place["cross_rank"]), int(place["cross_size"])) == (peers.index(host), len(peers))


@pytest.fixture(scope="module")
def pair(make_cluster: Callable[[Sequence[int]], Any]) -> Any:
    """Two hosts with a slot each."""
    return make_cluster((1, 1))


def error_of(master: str, host: str) -> str:
    """What a run on both hosts fails with."""
    from pipelines.launch.runner import BarrierRunner

    with session(master, host) as spark:
        try:
            return str(BarrierRunner(spark, 2, log_to_driver="none").run(len, ""))
        except RuntimeError as error:
            return str(error)


def train_until_lost(master: str, host: str, folder: str) -> tuple[str, str]:
    """Train for ever on both hosts, then on what is left: the value, and the first attempt's error."""
    import logging

    from pipelines.launch import preflight
    from pipelines.launch.runner import BarrierRunner

    logging.basicConfig(level=logging.INFO)
    errors: list[str] = []
    logging.getLogger("pipelines.launch.runner").addFilter(lambda record: errors.append(record.getMessage()) or True)

    def work() -> str:
        from pipelines.launch.report import attempt, step_done

        (Path(folder) / f"started-{attempt()}-{os.environ['HOROVOD_RANK']}").touch()
        while attempt() == 1:
            time.sleep(0.2)
            step_done()
        return f"attempt {attempt()} with {os.environ['HOROVOD_SIZE']} ranks"

    with session(master, host) as spark:
        runner = BarrierRunner(
            spark,
            2,
            retries=1,
            retry_wait=0.1,
            allowed_sizes=[1, 2],
            log_to_driver="none",
            # Executors of the host that is lost will not come back: no need to wait long for them.
            on_attempt=lambda attempt: setattr(preflight, "_REGISTRATION_SECONDS", 5.0),
        )
        return runner.run(work), errors[0]


def cut_off_when_started(cluster: Any, folder: Path, host: int, done: threading.Event) -> None:
    deadline = time.monotonic() + patient(150)
    while len(list(folder.glob("started-1-*"))) < 2:
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)
    time.sleep(1.0)
    cluster.link(host, "down")
    done.set()


def test_a_loopback_hostname_is_refused_before_anything_starts(pair: Any) -> None:
    name = socket.gethostname()
    pair.set_hosts(2, f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    try:
        error = pair.call(error_of, pair.master, pair.address(1))
    finally:
        pair.set_hosts(2, f"127.0.0.1 localhost\n{pair.address(2)} {name}\n")
    assert f"host {pair.address(2)} resolves its own name '{name}' to 127.0.1.1" in error
    assert f"map '{name}' to {pair.address(2)} in its /etc/hosts" in error


def test_different_versions_on_the_hosts_are_refused(pair: Any) -> None:
    other = pair.folder / "host2" / "horovod-0.27.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.27.0\n")
    try:
        error = pair.call(error_of, pair.master, pair.address(1))
    finally:
        (other / "METADATA").unlink()
        other.rmdir()
    assert "ranks have different versions of horovod" in error
    assert f"0.27.0 on {pair.address(2)}" in error


def flood(address: str, ports: Sequence[int], requests: int) -> dict[str, int]:
    """From a host that has no part in the job: without the secret, with a wrong one, as HTTP; what came of it."""
    import hmac
    import secrets

    answers = {"refused": 0, "answered": 0}
    for number in range(requests):
        port = ports[number % len(ports)]
        try:
            with socket.create_connection((address, port), 5) as stranger:
                match number % 3:
                    case 0:
                        nonce = stranger.recv(32)
                        own = secrets.token_bytes(32)
                        stranger.sendall(own + hmac.digest(secrets.token_bytes(32), b"task" + nonce + own, "sha256"))
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


def run_and_tell_ports(master: str, host: str, folder: str) -> tuple[list[int], float, list[str]]:
    """A run that lasts until strangers are done; its values, its duration and the secret's traces."""
    from pipelines.launch import runner as module
    from pipelines.launch.runner import BarrierRunner

    channels: list[Any] = []

    class Recorded(module.DriverChannel):  # type: ignore[name-defined, misc]
        def __init__(self, *args):  # type: ignore[no-untyped-def]  # the name `Any` does not travel this deep
            super().__init__(*args)
            channels.append(self)

    servers: list[Any] = []

    class RecordedServer(module.RendezvousServer):  # type: ignore[name-defined, misc]
        def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            super().__init__(*args, **kwargs)
            servers.append(self)
            (Path(folder) / "ports.tmp").write_text(f"{channels[-1].address.port} {self.port}")
            (Path(folder) / "ports.tmp").rename(Path(folder) / "ports")

    module.DriverChannel, module.RendezvousServer = Recorded, RecordedServer  # type: ignore[attr-defined, misc]
    lines: list[str] = []

    def work() -> int:
        from pipelines.launch.report import report

        number = 0
        while not (Path(folder) / "flooded").exists():
            number += 1
            print("line", number)
            report(number=number)
            time.sleep(0.01)
        return number

    with session(master, host) as spark:
        reports: list[int] = []
        runner = BarrierRunner(
            spark,
            2,
            on_log=lambda rank, line: lines.append(line) if rank == 0 else None,
            on_report=lambda message: reports.append(message["number"]) if message["rank"] == 0 else None,
        )
        numbers = runner.run_all(work)
    assert reports == list(range(1, numbers[0] + 1)), "reports were lost or out of order"
    assert [line for line in lines if line.startswith("line")] == [f"line {n + 1}" for n in range(numbers[0])]
    assert servers[-1]._values == {}, "a stranger wrote to the rendezvous"
    return numbers, float(channels[-1]._refused), sorted(channels[-1].peers)


def test_strangers_of_another_host_are_refused_while_a_job_runs(pair: Any, tmp_path: Path) -> None:
    """10,000 bad requests to both ports from a third host."""
    answers: list[dict[str, int]] = []

    def attack() -> None:
        deadline = time.monotonic() + patient(60)
        while not (tmp_path / "ports").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        with suppress(FileNotFoundError):
            ports = [int(port) for port in (tmp_path / "ports").read_text().split()]
            answers.append(pair.call(flood, pair.address(1), ports, 10_000, host=3))
        (tmp_path / "flooded").touch()

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        _, refused, peers = pair.call(run_and_tell_ports, pair.master, pair.address(1), str(tmp_path))
    finally:
        thread.join()
    assert answers == [{"refused": 10_000, "answered": 0}]
    assert refused >= 4_900
    assert peers == [pair.address(1), pair.address(2)]


def test_a_host_that_is_cut_off_is_named_and_the_rest_continues(pair: Any, tmp_path: Path) -> None:
    """Last: Spark drops the worker of that host."""
    cut_off = threading.Event()
    thread = threading.Thread(target=cut_off_when_started, args=(pair, tmp_path, 2, cut_off))
    thread.start()
    try:
        value, error = pair.call(train_until_lost, pair.master, pair.address(1), str(tmp_path), timeout=240)
    finally:
        thread.join()
        pair.link(2, "up")
    assert f"on {pair.address(2)} failed: lost: neither its Spark task nor its host answers" in error
    assert cut_off.is_set(), "the job did not start"
    assert value == "attempt 2 with 1 ranks"
