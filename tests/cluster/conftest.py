"""A Spark standalone cluster over network namespaces: hosts with addresses of their own on one machine.

Each namespace is a host of `benchmarks/links/network.py`; the driver runs in the first one.
"""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pyspark
import pytest

from tests.benchmarks.links.network import Hosts, run
from tests.patience import wait_until

_SERVE = """
import os, pickle, sys, traceback
for line in sys.stdin:
    call, value = line.split()
    try:
        function, args = pickle.load(open(call, "rb"))
        answer = function(*args), ""
    except BaseException:
        answer = None, traceback.format_exc()
    with open(value + ".new", "wb") as file:
        pickle.dump(answer, file)
    os.rename(value + ".new", value)
"""


class Cluster:
    """A master and a worker per host; hosts are 1, 2, ..."""

    def __init__(self, folder: Path, project: Path, hosts: Hosts) -> None:
        self.folder, self.project, self.hosts = folder, project, hosts
        self.log = folder / "processes.log"
        self._pythons: dict[int, subprocess.Popen[bytes]] = {}

    def address(self, host: int) -> str:
        return self.hosts.address(host - 1)

    def start(self, slots: Sequence[int]) -> None:
        (self.folder / "tmp").mkdir()
        self._daemon(1, "master.Master", "--host", self.address(1), "--port", "7077", "--webui-port", "0")
        for host, cores in enumerate(slots, 1):
            self._daemon(
                host, "worker.Worker", "--host", self.address(host), "--cores", str(cores), "--memory", "2g",
                "--webui-port", "0", "--work-dir", str(self.folder / f"work{host}"), f"spark://{self.address(1)}:7077",
            )  # fmt: skip
        registered = "Successfully registered with master"
        wait_until(lambda: self.log.read_text().count(registered) == len(slots), 180)

    def set_hosts(self, host: int, text: str) -> None:
        """The host's /etc/hosts; in place, because running processes have the file mounted."""
        with Path("/etc/netns", self.hosts.namespace(host - 1), "hosts").open("r+") as file:
            file.truncate()
            file.write(text)

    def link(self, host: int, state: str) -> None:
        run("ip", "link", "set", self.hosts.link(host - 1), state)

    def call(self, function: Callable[..., Any], *args: Any, host: int = 1, timeout: float = 240) -> Any:
        """Call a function in the host's Python, which is the same for all calls, so that they share a session."""
        number = len(list(self.folder.glob("call*")))
        call, value = self.folder / f"call{number}", self.folder / f"value{number}"
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            call.write_bytes(cloudpickle.dumps((function, args)))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        if host not in self._pythons:
            self._pythons[host] = self._start(host, sys.executable, "-c", _SERVE)
        python = self._pythons[host]
        python.stdin.write(f"{call} {value}\n".encode())
        python.stdin.flush()
        wait_until(lambda: value.exists() or python.poll() is not None, timeout)
        assert python.poll() is None, self.log.read_text()[-6000:]
        answer, error = pickle.loads(value.read_bytes())
        assert not error, f"{self.log.read_text()[-3000:]}\n{error}"
        return answer

    def _daemon(self, host: int, name: str, *arguments: str) -> None:
        spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        self._start(host, spark_class, f"org.apache.spark.deploy.{name}", *arguments)

    def _start(self, host: int, *words: str) -> "subprocess.Popen[bytes]":
        """A process on a host, in which `PYTHONPATH` has a folder of that host."""
        environment = {
            **os.environ,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_LOCAL_IP": self.address(host),
            "SPARK_LOCAL_HOSTNAME": self.address(host),
            "SPARK_LOCAL_DIRS": str(self.folder / "spark"),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": f"{self.folder / f'host{host}'}:{self.project}",
            "TMPDIR": str(self.folder / "tmp"),
        }
        with self.log.open("ab") as log:
            return self.hosts.start(
                host - 1,
                *words,
                env=environment,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Iterator[Cluster]:
    """Two slots on the first host, one on the second, and a third host for strangers."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("not root, or no `ip` command (iproute2)")
    probe = run("unshare", "--net", "ip", "link", "add", "gs-probe", "type", "bridge", check=False)
    if probe.returncode:
        pytest.skip(f"no network namespaces: {probe.stderr.strip()}")
    with Hosts(3) as hosts:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), project, hosts)
        cluster.start((2, 1))
        yield cluster
    assert hosts.namespace(0) not in run("ip", "netns", "list").stdout
