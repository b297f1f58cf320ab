"""Hosts on one machine: network namespaces on a bridge, with links of a set speed."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.patience import patient

NETWORK = "10.213.78"
# Large frames keep headers, 66 bytes each, under 1 % of what a counter shows; 1500 would add 4.6 %.
MTU = 9000
# A bucket as small as a segmented packet needs: what fits into it passes at full speed, so it must be little beside
# the smallest payload. The queue holds 50 ms, which is more than a sender's kernel puts there.
BURST_BYTES = 65536
QUEUE = "50ms"


def run(*command, check=True):
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=patient(30))


def missing():
    """Why there can be no hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "taskset") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)} (Debian: iproute2, util-linux)" if absent else ""


class Hosts:
    """A namespace a host, 10.213.78.1, .2, ...; leaving the `with` block removes them and ends their processes."""

    def __init__(self, count):
        self.count = count
        self._token = f"gsb{os.getpid() % 100000}"
        self._stack = ExitStack()

    def __enter__(self):
        bridge = f"{self._token}br"
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
            self._stack.callback(run, "ip", "link", "del", bridge, check=False)
            run("ip", "link", "set", bridge, "up")
            for host in range(self.count):
                self._add(host, bridge)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_):
        self._stack.close()

    def namespace(self, host):
        return f"{self._token}h{host}"

    def address(self, host):
        return f"{NETWORK}.{host + 1}"

    def link(self, host):
        """The bridge's end of the host's link."""
        return f"{self._token}v{host}"

    def start(self, host, *command, **options):
        """A process on the host; it ends with the host at the latest."""
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace(host), *command], **options)
        self._stack.callback(_end, process)
        return process

    def shape(self, mbit):
        """What each host may send, in Mbit/s of whole frames; None: no limit."""
        for host in range(self.count):
            device = ("-n", self.namespace(host), "qdisc")
            run("tc", *device, "del", "dev", "eth0", "root", check=False)
            if mbit is not None:
                limit = ("rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", QUEUE)
                run("tc", *device, "add", "dev", "eth0", "root", "tbf", *limit)

    def throughput(self, seconds=2.0):
        """Mbit/s of payload that a plain TCP connection from the first host to the second reaches."""
        receiver = self.start(1, sys.executable, "-c", _RECEIVE, self.address(1), stdout=subprocess.PIPE, text=True)
        receiver.stdout.readline()
        self.start(0, sys.executable, "-c", _SEND, self.address(1), str(seconds)).wait(timeout=60)
        return json.loads(receiver.stdout.readline())

    def round_trip(self, rounds=200):
        """Seconds in which a byte comes back from the second host, the median, over a plain TCP connection."""
        mirror = self.start(1, sys.executable, "-c", _MIRROR, self.address(1), stdout=subprocess.PIPE, text=True)
        mirror.stdout.readline()
        asking = self.start(
            0, sys.executable, "-c", _ASK, self.address(1), str(rounds), stdout=subprocess.PIPE, text=True
        )
        seconds = json.loads(asking.stdout.readline())
        mirror.wait(timeout=60)
        return seconds

    def _add(self, host, bridge):
        namespace, link = self.namespace(host), self.link(host)
        folder = Path("/etc/netns", namespace)
        folder.mkdir(parents=True)
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # All namespaces share the machine's name, and Gloo binds to what it resolves to.
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(host)} {os.uname().nodename}\n")
        run("ip", "netns", "add", namespace)
        self._stack.callback(run, "ip", "netns", "del", namespace, check=False)
        self._stack.callback(run, "sh", "-c", f"kill -9 $(ip netns pids {namespace})", check=False)
        run("ip", "link", "add", link, "mtu", str(MTU), "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._stack.callback(run, "ip", "link", "del", link, check=False)
        run("ip", "link", "set", link, "master", bridge, "up")
        run("ip", "-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        run("ip", "-n", namespace, "link", "set", "eth0", "mtu", str(MTU), "up")
        run("ip", "-n", namespace, "link", "set", "lo", "up")


def _end(process):
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 4000))
print("listening", flush=True)
connection, _ = server.accept()
buffer, received = bytearray(1 << 20), 0
connection.recv_into(buffer)
started = time.perf_counter()
while count := connection.recv_into(buffer):
    received += count
print(received * 8e-6 / (time.perf_counter() - started), flush=True)
"""
_SEND = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 4000))
block, end = bytes(1 << 18), time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end:
    connection.sendall(block)
connection.close()
"""
_MIRROR = """
import socket, sys
server = socket.create_server((sys.argv[1], 4001))
print("listening", flush=True)
connection, _ = server.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := connection.recv(1):
    connection.sendall(data)
"""
_ASK = """
import socket, statistics, sys, time
connection = socket.create_connection((sys.argv[1], 4001))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
seconds = []
for _ in range(int(sys.argv[2])):
    started = time.perf_counter()
    connection.sendall(b"x")
    connection.recv(1)
    seconds.append(time.perf_counter() - started)
connection.close()
print(statistics.median(seconds), flush=True)
"""
