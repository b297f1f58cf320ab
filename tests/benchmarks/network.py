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

import datetime
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path

from links import alone, shapes

from tests.benchmarks.parts.command import clean_up_on_sigterm, command
from tests.benchmarks.parts.ranks import each_on_ranks, on_ranks

PROJECT = Path(__file__).parents[2]
RESULT = Path(__file__).parent / "results" / "network.json"
PARTS = PROJECT / "outputs" / "network.json"
LINKS = {"mbit_100": 100, "mbit_1000": 1000, "unshaped": None}
COLLECTIVES = ("allreduce", "alltoall", "allgather")
CODECS = {"none": {}, "onebit": {}, "powersgd": {"rank": 4}, "qsgd": {"bits": 4}, "topk": {"density": 0.01}}
BATCHES = (4, 8, 16, 32)
SIZES = (8_192, 131_072, 1_048_576, 4_194_304, 8_388_608)
REPEATS, STEPS = 5, 6


def computing(batches, steps, *, small):
    """Seconds of each step by batch, and the gradients in the order in which they are ready."""
    points, gradients = [], []
    cases = [(batch, steps, small) for batch in batches]
    for batch, (found,) in zip(batches, each_on_ranks(1, alone.compute, cases, together=small), strict=True):
        points.append({"batch_size": batch, "seconds": found["seconds"]})
        gradients = found["gradients"]
        print(f"batch {batch:3}: {statistics.median(found['seconds']):.3f} s a step", flush=True)
    return points, gradients


def straggling(batch, steps, *, small):
    """Standard deviation over mean of the steps of two ranks at the same time, the mean of both."""
    seconds = [each["seconds"] for each in on_ranks(2, alone.compute, batch, steps, small)]
    found = statistics.mean(statistics.stdev(each) / statistics.mean(each) for each in seconds)
    print(f"stragglers: a step's deviation is {100 * found:.2f} % of its mean", flush=True)
    return found


def codec_costs(codecs, repeats, sizes, *, together):
    """The part `codecs` of the file, for gradients of these shapes."""
    cases = [(name, parameters, repeats, sizes) for name, parameters in codecs.items()]
    found = []
    for (costs,) in each_on_ranks(1, alone.codec, cases, together=together):
        found.append(costs)
        seconds = {key: round(statistics.median(costs[key]), 4) for key in ("encode_seconds", "decode_seconds")}
        print(f"{costs['name']:10} {costs['messages']} {seconds}", flush=True)
    return found


def over_links(links, sizes, repeats):
    """The parts `links` and `collectives` of the file."""
    from links.network import Hosts
    from links.ring import Ring, latency_of, timed_collective

    measured, points = [], []
    script = Path(__file__).parent / "links" / "questions.py"
    with Hosts(2) as hosts, Ring(hosts, {}, script) as ring:
        for name, mbit in links.items():
            measured.append(latency_of(hosts, name, mbit, repeats))
            points += [
                timed_collective(ring, name, collective, size, repeats, warm_up=2)
                for collective in COLLECTIVES
                for size in sizes
            ]
            print(f"{name}: latency {1e6 * statistics.median(measured[-1]['latency_seconds']):.0f} us", flush=True)
    return measured, points


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
    parser = command(__doc__, "a tiny network, no links, nothing kept")
    parser.add_argument("--output", type=Path, default=RESULT, help="file of the measurements")
    parser.add_argument("--resume", action="store_true", help="keep the parts that an interrupted run has measured")
    options = parser.parse_args()
    from links.network import missing

    smoke = options.smoke
    if reason := "" if smoke else missing():
        parser.error(reason)
    batches, steps = ((2, 64), 3) if smoke else (BATCHES, STEPS)
    codecs = {name: CODECS[name] for name in ("none", "onebit")} if smoke else CODECS
    ways = {
        "compute": lambda: computing(batches, steps, small=smoke),
        "stragglers": lambda: straggling(batches[0 if smoke else 1], steps if smoke else 4 * steps, small=smoke),
        "codecs": lambda: codec_costs(
            codecs, 2 if smoke else REPEATS, shapes.SMALL if smoke else shapes.resnet50(), together=smoke
        ),
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
    clean_up_on_sigterm()
    main()
