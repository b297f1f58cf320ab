"""A Spark standalone cluster over network namespaces: hosts with addresses of their own on one machine.

Each namespace is a host on a bridge, with its own /etc/hosts; the driver runs in the first one.
"""

import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pyspark
import pytest

from tests.patience import patient

NETWORK = "10.213.77"
_START_SECONDS = patient(180)
_RUN = """
import pickle, sys
function, args = pickle.load(open(sys.argv[1], "rb"))
pickle.dump(function(*args), open(sys.argv[2], "wb"))
"""


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=patient(30))


def missing() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    name = f"gs-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name[-12:], "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    finally:
        run("ip", "link", "del", name[-12:], check=False)
        run("ip", "netns", "del", name, check=False)
    return ""


class Cluster:
    """A master and a worker per host; hosts are `h1`, `h2`, ... at 10.213.77.1, .2, ..."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder = folder
        self.project = project
        self.token = f"gs{os.getpid() % 10000}"
        self.bridge = f"{self.token}br"
        self.log = folder / "daemons.log"
        self._stack = ExitStack()

    def namespace(self, host: int) -> str:
        return f"{self.token}h{host}"

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host}"

    @property
    def master(self) -> str:
        return f"spark://{self.address(1)}:7077"

    def environment(self, host: int) -> dict[str, str]:
        return {
            **os.environ,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_LOCAL_IP": self.address(host),
            "SPARK_LOCAL_HOSTNAME": self.address(host),
            "SPARK_LOCAL_DIRS": str(self.folder / "spark"),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": f"{self.folder / f'host{host}'}:{self.project}",
            "TMPDIR": str(self.folder / "tmp"),
        }

    def start(self, slots: Sequence[int]) -> None:
        (self.folder / "tmp").mkdir()
        hostname = os.uname().nodename
        run("ip", "link", "add", self.bridge, "type", "bridge")
        self._stack.callback(run, "ip", "link", "del", self.bridge, check=False)
        run("ip", "link", "set", self.bridge, "up")
        for host in range(1, len(slots) + 2):  # one more: a stranger's
            self._add_host(host, f"127.0.0.1 localhost\n{self.address(host)} {hostname}\n")
        self._daemon(1, "master.Master", "--host", self.address(1), "--port", "7077", "--webui-port", "0")
        for host, cores in enumerate(slots, 1):
            self._daemon(
                host, "worker.Worker", "--host", self.address(host), "--cores", str(cores), "--memory", "2g",
                "--webui-port", "0", "--work-dir", str(self.folder / f"work{host}"), self.master,
            )  # fmt: skip
        deadline = time.monotonic() + _START_SECONDS
        while self.log.read_text().count("Successfully registered with master") < len(slots):
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def set_hosts(self, host: int, text: str) -> None:
        """The host's /etc/hosts; in place, because running processes have the file mounted."""
        with Path("/etc/netns", self.namespace(host), "hosts").open("r+") as file:
            file.truncate()
            file.write(text)

    def link(self, host: int, state: str) -> None:
        run("ip", "link", "set", f"{self.token}v{host}", state)

    def call(self, function: Callable[..., Any], *args: Any, host: int = 1, timeout: float = 240) -> Any:
        """Call a function in a new Python on a host; its value."""
        number = len(list(self.folder.glob("call*")))
        call, value = self.folder / f"call{number}", self.folder / f"value{number}"
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            call.write_bytes(cloudpickle.dumps((function, args)))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        command = [sys.executable, "-c", _RUN, str(call), str(value)]
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace(host), *command],
            env=self.environment(host), capture_output=True, text=True, timeout=patient(timeout), cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return pickle.loads(value.read_bytes())

    def close(self) -> None:
        self._stack.close()

    def _add_host(self, host: int, hosts_file: str) -> None:
        namespace, link = self.namespace(host), f"{self.token}v{host}"
        folder = Path("/etc/netns", namespace)
        folder.mkdir(parents=True)
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "hosts").write_text(hosts_file)
        run("ip", "netns", "add", namespace)
        self._stack.callback(run, "ip", "netns", "del", namespace, check=False)
        self._stack.callback(self._kill_all, namespace)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._stack.callback(run, "ip", "link", "del", link, check=False)
        run("ip", "link", "set", link, "master", self.bridge, "up")
        run("ip", "-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        run("ip", "-n", namespace, "link", "set", "eth0", "up")
        run("ip", "-n", namespace, "link", "set", "lo", "up")

    def _daemon(self, host: int, name: str, *arguments: str) -> None:
        spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        daemon = [spark_class, f"org.apache.spark.deploy.{name}", *arguments]
        command = ["ip", "netns", "exec", self.namespace(host), *daemon]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, env=self.environment(host), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)

    def _kill_all(self, namespace: str) -> None:
        for pid in run("ip", "netns", "pids", namespace, check=False).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)


@pytest.fixture(scope="session")
def needs_namespaces() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def make_cluster(
    needs_namespaces: None, tmp_path_factory: pytest.TempPathFactory, project: Path
) -> Iterator[Callable[[Sequence[int]], Cluster]]:
    """Makes a cluster with so many slots on each host."""
    with ExitStack() as stack:

        def make(slots: Sequence[int]) -> Cluster:
            cluster = Cluster(tmp_path_factory.mktemp("cluster"), project)
            stack.callback(cluster.close)
            try:
                cluster.start(slots)
            except BaseException:
                cluster.close()  # the next one has the same names
                raise
            return cluster

        yield make
    left = run("ip", "netns", "list").stdout
    assert f"gs{os.getpid() % 10000}h" not in left
