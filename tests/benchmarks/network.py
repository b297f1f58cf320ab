"""What the scaling model needs of one node and one link: a file for `groundswell estimate --measurements`.

    make bench NAME=network ARGS="--output measured.json"
    make bench NAME=network ARGS=--smoke

Measured, each several times:

* computing: training steps of a ResNet-50 (120x120x12, LARS) without an exchange, one rank on one core, at several
  batches; and when each gradient is ready, from the clocks of the step's own graph;
* stragglers: the standard deviation of a rank's computing over its mean, of two ranks that compute at the same time;
* each codec: messages of an exchange by collective, and the seconds of encoding and decoding, one rank on one core;
* each link (100 Mbit/s, 1 Gbit/s, no limit), between two network namespaces with one rank each: latency (half a round
  trip of one byte), and allreduce, alltoall and allgather, which are what the exchange uses, by bytes.

It needs root for the namespaces. The last line is JSON: the file, and of each link and collective the achieved part of
the nominal speed. `--smoke` measures a tiny network at two batches, two codecs, and no link: those figures are null.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "network.json"
PARTS = PROJECT / "outputs" / "network.json"
LINKS = {"mbit_100": 100, "mbit_1000": 1000, "unshaped": None}
COLLECTIVES = ("allreduce", "alltoall", "allgather")
CODECS = {"none": {}, "onebit": {}, "powersgd": {"rank": 4}, "qsgd": {"bits": 4}, "topk": {"density": 0.01}}
BATCHES = (4, 8, 16, 32)
SIZES = (8_192, 131_072, 1_048_576, 4_194_304, 8_388_608)
REPEATS, STEPS = 5, 6


def own_process(name, *arguments, cores="0"):
    """The JSON that a function of `links.alone` prints, in a process with one thread on one core."""
    from pipelines.launch.process import ALLOCATOR, THREAD_VARIABLES

    command = ["taskset", "-c", cores, sys.executable, str(Path(__file__).parent / "links" / "alone.py"), name]
    environment = {
        **os.environ,
        **ALLOCATOR,
        **dict.fromkeys(THREAD_VARIABLES, "1"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
        "PYTHONPATH": str(PROJECT),
    }
    return subprocess.Popen(
        [*command, json.dumps(arguments)],
        env=environment,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_of(process):
    """What it printed last."""
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(errors[-3000:])
    return json.loads(output.splitlines()[-1])


def computing(batches, steps, *, small):
    """Seconds of each step by batch, and the gradients in the order in which they are ready."""
    points, gradients = [], []
    for batch in batches:
        found = answer_of(own_process("compute", batch, steps, small))
        points.append({"batch_size": batch, "seconds": found["seconds"]})
        gradients = found["gradients"]
        print(f"batch {batch:3}: {statistics.median(found['seconds']):.3f} s a step", flush=True)
    return points, gradients


def straggling(batch, steps, *, small):
    """Standard deviation over mean of the steps of two ranks at the same time, the mean of both."""
    cores = [str(rank % (os.cpu_count() or 1)) for rank in range(2)]
    both = [own_process("compute", batch, steps, small, cores=core) for core in cores]
    seconds = [answer_of(process)["seconds"] for process in both]
    found = statistics.mean(statistics.stdev(each) / statistics.mean(each) for each in seconds)
    print(f"stragglers: a step's deviation is {100 * found:.2f} % of its mean", flush=True)
    return found


def codec_costs(codecs, repeats, *, small):
    """The part `codecs` of the file."""
    found = []
    for name, parameters in codecs.items():
        found.append(answer_of(own_process("codec", name, parameters, repeats, small)))
        costs = {key: round(statistics.median(found[-1][key]), 4) for key in ("encode_seconds", "decode_seconds")}
        print(f"{name:10} {found[-1]['messages']} {costs}", flush=True)
    return found


def over_links(links, sizes, repeats):
    """The parts `links` and `collectives` of the file."""
    from links.network import Hosts
    from links.ring import Ring

    measured, points = [], []
    script = Path(__file__).parent / "links" / "questions.py"
    with Hosts(2) as hosts, Ring(hosts, {}, script) as ring:
        ring.wait_until_ready()
        for name, mbit in links.items():
            hosts.shape(mbit)
            latency = [hosts.round_trip() / 2 for _ in range(repeats)]
            nominal = None if mbit is None else mbit * 1e6 / 8
            measured.append({"name": name, "bytes_per_second": nominal, "latency_seconds": latency})
            for collective in COLLECTIVES:
                for size in sizes:
                    points.append(timed_collective(ring, name, collective, size, repeats))
            print(f"{name}: latency {1e6 * statistics.median(latency):.0f} us", flush=True)
    return measured, points


def timed_collective(ring, link, collective, size, repeats):
    """One point of the part `collectives`: the slowest rank's seconds."""
    ask = {"collective": collective, "bytes": size}
    ring.ask(**ask, repeats=2)  # connections open their windows at this speed
    answers = ring.ask(**ask, repeats=repeats)
    seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
    return {"link": link, "collective": collective, "ranks": len(answers), "bytes": size, "seconds": seconds}


def summary(measurements):
    """By link and collective: the part of the nominal speed that is reached (of no limit: MB/s); all null without."""
    from pipelines.scaling.fit import fit
    from pipelines.scaling.measurements import Measurements

    checked = Measurements.model_validate(measurements, strict=False)
    parameters = fit(checked)
    found = {}
    for name in LINKS:
        link = parameters.links.get(name)
        found[name] = dict.fromkeys(("latency_us", *COLLECTIVES))
        if link is None:
            continue
        found[name]["latency_us"] = round(1e6 * link.latency_seconds, 1)
        for collective, wire in link.wires.items():
            unit = link.nominal or 1e6
            found[name][collective] = round(wire.bytes_per_second / unit, 3)
            operation = 1e3 * wire.operation_seconds
            print(f"{name:10} {collective:10} {found[name][collective]:8} {operation:.2f} ms an operation", flush=True)
    return {
        "seconds_fixed": round(parameters.worker.fixed_seconds, 4),
        "seconds_per_image": round(parameters.worker.seconds_per_image, 4),
        "straggler_deviation": round(checked.straggler_deviation, 4),
        "links": found,
    }


def main():
    """Measure, write the file, and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT, help="file of the measurements")
    parser.add_argument("--resume", action="store_true", help="keep the parts that an interrupted run has measured")
    parser.add_argument("--smoke", action="store_true", help="a tiny network, no links, nothing kept")
    options = parser.parse_args()
    from links.network import missing

    smoke = options.smoke
    if reason := "" if smoke else missing():
        parser.error(reason)
    batches, steps = ((2, 32), 3) if smoke else (BATCHES, STEPS)
    codecs = {name: CODECS[name] for name in ("none", "onebit")} if smoke else CODECS
    ways = {
        "compute": lambda: computing(batches, steps, small=smoke),
        "stragglers": lambda: straggling(batches[0 if smoke else 1], steps if smoke else 4 * steps, small=smoke),
        "codecs": lambda: codec_costs(codecs, 2 if smoke else REPEATS, small=smoke),
        "links": lambda: ([], []) if smoke else over_links(LINKS, SIZES, REPEATS),
    }
    kept = json.loads(PARTS.read_text()) if options.resume and PARTS.exists() else {}
    for name, way in ways.items():
        if name not in kept:
            kept[name] = way()
            if not smoke:
                PARTS.parent.mkdir(parents=True, exist_ok=True)
                PARTS.write_text(json.dumps(kept))
    (compute, gradients), (links, points) = kept["compute"], kept["links"]
    cores = os.cpu_count()
    measurements = {
        "format_version": 1,
        "machine": f"{platform.machine()}, {cores} cores, one for each rank",
        "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": "a tiny ResNet" if smoke else "ResNet-50, 120x120x12",
        "compute": compute,
        "straggler_deviation": kept["stragglers"],
        "gradients": gradients,
        "links": links,
        "collectives": points,
        "codecs": kept["codecs"],
    }
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "network.json" if smoke else options.output
        file.write_text(json.dumps(measurements, indent=1) + "\n")
        print(json.dumps({"file": str(file), "cores": cores, **summary(measurements)}))


if __name__ == "__main__":
    # The end of this process by a signal must remove the namespaces too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.path.insert(0, str(PROJECT))
    main()
