"""Steps of 2 to 8 ranks on shaped links, and the model that is fitted to those of 2."""

import math
import os
import statistics
from contextlib import ExitStack
from pathlib import Path

from links import shapes
from links.network import Hosts
from links.ring import Ring, latency_of, timed_collective

from pipelines.scaling.fit import fit
from pipelines.scaling.measurements import Measurements
from pipelines.scaling.step import Topology, step_seconds
from tests.benchmarks.parts.figures import slowest

QUESTIONS = Path(__file__).with_name("questions.py")
LINKS = {"mbit_100": 100, "mbit_1000": 1000}
COLLECTIVES = ("allreduce", "alltoall", "allgather")
SIZES = (8_192, 131_072, 1_048_576, 8_388_608)
BUCKET_MIB = 8.0
BATCH = 4
WARMUP_STEPS, STEPS, REPEATS = 1, 4, 5
# While one thread sleeps, which is computing here, another one serves the exchange. With a single thread TensorFlow
# would begin the exchange after the last sleep: unlike the many operations of a backward pass, sleeps leave no gaps.
TWO_THREADS = {"TF_NUM_INTEROP_THREADS": "2"}
_CPU = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 10_000


def missing():
    """Why ranks cannot get a quota of processor here; empty where they can."""
    return "" if (_CPU / "cpu.cfs_quota_us").exists() else f"there is no cpu controller of cgroup v1 in {_CPU}"


class Quota:
    """Gives each rank of a ring the same part of a core; leaving the `with` block takes the groups away."""

    def __init__(self, share):
        self._share = share
        self._groups = []
        self._stack = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def hold(self, processes):
        """Put each process into a group of its own; the groups go when the processes have ended."""
        for number, process in enumerate(processes):
            group = _CPU / f"groundswell_{os.getpid()}_{number}"
            group.mkdir()
            self._stack.callback(group.rmdir)
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cgroup.procs").write_text(str(process.pid))
            self._groups.append(group)

    def limit(self, on):
        """Keep the processes to their share from now on, or let them have all."""
        for group in self._groups:
            (group / "cpu.cfs_quota_us").write_text(str(round(self._share * _PERIOD_US) if on else -1))


def measure(ranks, codecs, compute, share):
    """Steps of one number of ranks by link and codec, and between 2 ranks the collectives alone.

    Args:
        ranks: N.
        codecs: Parameters by name.
        compute: `seconds` of a step's computing, and `ready`, of each of `shapes.SCALED` from the last to the first.
        share: Of a core, for each rank.

    Returns:
        `steps`, a list of a dict for each link and codec; `links` and `collectives` as in the file of measurements.
    """
    found = {"ranks": ranks, "steps": [], "links": [], "collectives": []}
    # The quota is left last: a group can only be removed when its process has ended.
    with Quota(share) as quota, Hosts(ranks) as hosts, Ring(hosts, {}, QUESTIONS, TWO_THREADS) as ring:
        if ranks == 2:
            found["links"] = [latency_of(hosts, name, mbit, REPEATS) for name, mbit in LINKS.items()]
        quota.hold(ring.processes)
        quota.limit(True)
        if ranks == 2:
            for name, mbit in LINKS.items():
                hosts.shape(mbit)
                found["collectives"] += [
                    timed_collective(ring, name, kind, size, REPEATS) for kind in COLLECTIVES for size in SIZES
                ]
        for codec, parameters in codecs.items():
            method = {"codec": codec, "parameters": parameters, "shapes": shapes.SCALED, "bucket_mib": BUCKET_MIB}
            hosts.shape(None)
            quota.limit(False)
            ring.ask(prepare=method | compute)
            ring.ask(steps=1)  # traced and compiled
            quota.limit(True)
            for name, mbit in LINKS.items():
                hosts.shape(mbit)
                ring.ask(steps=WARMUP_STEPS)
                found["steps"].append({"link": name, "codec": codec} | _steps(ring))
                print(f"{ranks} ranks {name:10} {codec:10} {found['steps'][-1]['seconds']}", flush=True)
    return found


def _steps(ring):
    answers = ring.ask(steps=STEPS)
    parts = {
        name: [statistics.mean(answer["parts"][step][name] for answer in answers) for step in range(STEPS)]
        for name in ("encode_seconds", "decode_seconds")
    }
    return {"seconds": [round(each, 4) for each in slowest(answers)]} | parts


def measurements_of(pair, compute, messages):
    """The measurements of 2 ranks as the model takes them.

    Args:
        pair: What `measure` found for 2 ranks.
        compute: As `measure`.
        messages: By codec, `messages` and `dense_bytes`, as in the file of measurements.
    """

    # What the exchange takes beside encoding, sending and decoding (checks, copies) is what its steps take more.
    rows = rows_of([pair], _measurements(pair, compute, messages, {}))
    rest = {
        codec: max(0.0, statistics.median(row["measured"] - row["predicted"] for row in rows if row["codec"] == codec))
        for codec in messages
    }
    return _measurements(pair, compute, messages, rest)


def _measurements(pair, compute, messages, rest):
    codecs = []
    for codec, sent in messages.items():
        steps = [step for step in pair["steps"] if step["codec"] == codec]
        parts = ("encode_seconds", "decode_seconds")
        seconds = {name: [each for step in steps for each in step[name]] for name in parts}
        seconds["decode_seconds"] = [each + rest.get(codec, 0.0) for each in seconds["decode_seconds"]]
        codecs.append({"name": codec, **sent, **seconds})
    return Measurements.model_validate(
        {
            "format_version": 1,
            "machine": "2 ranks with a quota each",
            "measured": "now",
            "model": "gradients of 18 MB, computing is a sleep",
            "compute": [{"batch_size": BATCH, "seconds": [compute["seconds"]]}],
            "straggler_deviation": 0.0,
            "gradients": _gradients(compute["ready"]),
            "links": pair["links"],
            "collectives": pair["collectives"],
            "codecs": codecs,
        },
        strict=False,
    )


def _gradients(ready):
    """The scaled gradients; biases, which share no bucket with the kernels here, count with the kernel after them."""
    found, pending = [], 0
    for shape, part in zip(reversed(shapes.SCALED), ready, strict=True):
        pending += 4 * math.prod(shape)
        if len(shape) > 1:
            found.append({"bytes": pending, "ready": part})
            pending = 0
    return found


def rows_of(measured, measurements):
    """A row for each step that was measured: what the model, fitted to 2 ranks, says of it."""
    parameters = fit(measurements)
    rows = []
    for of_ranks in measured:
        for step in of_ranks["steps"]:
            topology = Topology(parameters.links[step["link"]].wires)
            codec = parameters.codecs[step["codec"]]
            predicted = step_seconds(parameters.worker, codec, topology, of_ranks["ranks"], BATCH, BUCKET_MIB)
            seconds = statistics.median(step["seconds"])
            row = {"ranks": of_ranks["ranks"], "link": step["link"], "codec": step["codec"]}
            rows.append(row | {"measured": seconds, "predicted": predicted, "error": predicted / seconds - 1})
    return rows
