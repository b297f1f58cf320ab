"""Ranks on hosts, one core each, that take one command after another."""

import json
import os
import sys
import tempfile
from pathlib import Path

from pipelines.launch.driver.placement import place
from pipelines.launch.rank.process import ALLOCATOR, THREAD_VARIABLES
from tests.benchmarks.parts.figures import slowest

RANK = Path(__file__).with_name("rank.py")
PROJECT = Path(__file__).parents[3]


class Ring:
    """One process a host; use as a context, which ends them."""

    def __init__(self, hosts, settings, script=RANK, environment=None):
        """Start the processes.

        Args:
            hosts: One rank each.
            settings: For the ranks; see the script.
            script: What the ranks run.
            environment: Added to that of every rank.
        """
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the ranks are
        self.processes = []
        """Those of the ranks, in their order."""
        for placement in place([hosts.address(host) for host in range(hosts.count)]):
            rank = placement.rank
            arguments = {**settings, "rank": rank, "size": hosts.count, "address": hosts.address(rank)}
            core = str(rank % (os.cpu_count() or 1))
            self.processes.append(
                hosts.start(
                    rank,
                    *("taskset", "-c", core, sys.executable, str(script)),
                    json.dumps({**arguments, "rendezvous": hosts.address(0)}),
                    env={
                        **os.environ,
                        **ALLOCATOR,
                        **dict.fromkeys(THREAD_VARIABLES, "1"),
                        "CUDA_VISIBLE_DEVICES": "-1",
                        "TF_CPP_MIN_LOG_LEVEL": "2",
                        "HOROVOD_GLOO_RENDEZVOUS_ADDR": hosts.address(0),
                        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29400",
                        **placement.environment(),
                        "PYTHONPATH": str(PROJECT),
                        **(environment or {}),
                    },
                    cwd=PROJECT,
                    start_new_session=True,
                    stdin=-1,
                    stdout=-1,
                    stderr=self._log,
                    text=True,
                )
            )

    def __enter__(self):
        """Wait until all are ready."""
        self._answers()
        return self

    def __exit__(self, *_):
        for rank in self.processes:
            rank.kill()
            rank.wait()
        self._log.close()

    def ask(self, **question):
        """Every rank's answer."""
        for rank in self.processes:
            rank.stdin.write(json.dumps(question) + "\n")
            rank.stdin.flush()
        return self._answers()

    def _answers(self):
        answers = []
        for rank in self.processes:
            line = rank.stdout.readline()
            if not line:
                self._log.seek(0)
                raise RuntimeError(f"a rank ended:\n{self._log.read()[-4000:]}")
            answers.append(json.loads(line))
        return answers


def latency_of(hosts, name, mbit, repeats):
    """One entry of `links` in a file of measurements: half of some round trips at this speed."""
    hosts.shape(mbit)
    latency = [hosts.round_trip() / 2 for _ in range(repeats)]
    nominal = None if mbit is None else mbit * 1e6 / 8
    return {"name": name, "bytes_per_second": nominal, "latency_seconds": latency}


def timed_collective(ring, link, collective, size, repeats, warm_up=1):
    """One entry of `collectives` in a file of measurements: the slowest rank's seconds."""
    ask = {"collective": collective, "bytes": size}
    ring.ask(**ask, repeats=warm_up)  # connections open their windows at this speed
    answers = ring.ask(**ask, repeats=repeats)
    return {"link": link, **ask, "ranks": len(answers), "seconds": slowest(answers)}
