"""Compressed exchanges: encoding and decoding a ResNet-50's gradient on one core, then whole training steps over links.

    make bench NAME=compression
    make bench NAME=compression ARGS="--resume onebit powersgd"
    make bench NAME=compression ARGS=--smoke

For each method it measures `encode_decode_ms`: one encoding of all kernels (residual included) and one decoding, as a
rank does for its own gradient. `exchange_ms` is a whole exchange on one rank, with both rounds, state and checks.
`first_seconds` is the first exchange, which is traced and compiled. The payload is in MB; the gradients have 94.5 MB.
All times are processor time of one thread, which other processes disturb less than wall time; compare on an idle
machine all the same. The allocator settings are those that the launcher gives to workers.

The second part (`links`) makes two network namespaces with one rank and one core each. The link between them has 50
Mbit/s to 1 Gbit/s, or no limit. It measures seconds of a training step, and bytes by the interface's counter, for every
method, for Horovod's own fp32 and for its fp16. It also measures the bytes that a rank sends among 2, 4 and 8 ranks. If
`GROUNDSWELL_TORCH=<folder>` names a folder with PyTorch, the exchange alone is measured beside PyTorch's PowerSGD hook.
This part needs root. Every method and speed is a line in `outputs/compression_links/<method>.jsonl`; `--resume` keeps
existing lines. meProp is not among the methods: it saves computation, and its gradients travel like any others.

The last line is JSON: `methods` by name, and for each method its times at each speed and its bytes. What was not
measured is null. `--smoke` measures three methods on a few small gradients, and nothing over links.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

from links import measure as links
from links import shapes
from links.network import missing

from tests.benchmarks.parts.command import clean_up_on_sigterm, command
from tests.benchmarks.parts.figures import head, row
from tests.benchmarks.parts.ranks import each_on_ranks

PROJECT = Path(__file__).parents[2]
RAW = PROJECT / "outputs" / "compression_links"
PLOT = Path(__file__).parent / "results" / "compression_links.png"
SPEEDS = (None, 1000, 500, 250, 100, 50)
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "onebit": {},
    "scaled_sign": {},
    "qsgd": {"bits": 4},
    "norm_sparsifier": {},
    "threshold": {"tau": 3.0},
    "adaptive": {"density": 0.001},
    "topk": {"density": 0.001},
    "topk 1 %": {"density": 0.01},
    "dgc": {"density": 0.001},
    "randomk": {"density": 0.01},
    "powersgd": {"rank": 4},
    "onebit_adam": {},
}
REPEATS = 5
SMOKE_METHODS = ("none", "onebit", "topk")
FIGURES = (
    "step_wire_over_payload",
    "sent_bytes",
    "payload_bytes",
    "control_bytes_per_second",
    "wire_over_payload",
    "encode_decode_ms",
)
"""What the last line has for every method, beside its times at each speed."""


def measure_method(name, sizes):
    """Milliseconds and bytes of one method, for gradients of these shapes, on one core with one thread."""
    import numpy as np
    import tensorflow as tf

    from conf.sections.optimizers import LARSConfig, OneBitAdamConfig
    from tests.benchmarks.parts import training

    training.pin()

    def milliseconds(call):
        seconds = []
        for _ in range(REPEATS + 2):
            start = time.process_time()
            np.asarray(tf.nest.flatten(call(), expand_composites=True)[-1])
            seconds.append(time.process_time() - start)
        return round(1000 * statistics.median(seconds[2:]), 1)

    optimizer = OneBitAdamConfig() if name == "onebit_adam" else LARSConfig()
    codec = {"name": name.split()[0], **METHODS[name]}
    exchange = training.exchange_of(training.Alone(), codec, optimizer, bucket_mib=None)
    exchange.build([tf.zeros(shape) for shape in sizes])
    gradients = [
        tf.random.stateless_normal(shape, (0, index)) * 10.0 ** (index % 3 - 1) for index, shape in enumerate(sizes)
    ]
    whole = tf.function(exchange.exchange)
    started = time.process_time()
    np.asarray(whole(gradients)[-1])
    first_seconds = time.process_time() - started
    step, scale = tf.constant(5), tf.constant(1.0)
    last = len(exchange.codec.collectives)
    timings = {"exchange_ms": lambda: whole(gradients)}
    if last:
        first = tf.function(lambda *args: exchange._phase(0, 0)(*args)[:2])
        decode = tf.function(lambda *args: exchange._phase(0, last)(*args)[0])
        values = [gradients[i] for i in exchange._buckets[0]]
        memories = [exchange._read(i) for i in exchange._buckets[0]]
        messages, between = first(values, memories, step, scale)
        if last == 2 and exchange.codec.collectives[0] == "allreduce":
            # PowerSGD computes Q from P once before it decodes.
            middle = tf.function(lambda *args: exchange._phase(0, 1)(*args)[:2])
            factors, after = middle(messages, between, step, scale)
            timings["middle"] = lambda: middle(messages, between, step, scale)
            timings["decode"] = lambda: decode(factors, after, step, scale)
        else:
            timings["decode"] = lambda: decode(messages, between, step, scale)
        timings["encode"] = lambda: first(values, memories, step, scale)
    result = {key: milliseconds(call) for key, call in timings.items()}
    parts = [result.pop(key, 0.0) for key in ("encode", "middle", "decode")]
    result["encode_ms"], result["decode_ms"] = round(parts[0] + parts[1], 1), round(parts[2], 1)
    result["encode_decode_ms"] = round(sum(parts), 1)
    result["first_seconds"] = round(first_seconds, 1)
    result["payload_mb"] = round(exchange.metrics().payload_bytes / 1e6, 3)
    return result


def encode_decode(names, *, smoke):
    """Results of `measure_method` by name: one process per method, or one for all in a smoke run."""
    cases = [(name, shapes.SMALL if smoke else shapes.resnet50()) for name in names]
    methods = {}
    for name, (result,) in zip(names, each_on_ranks(1, measure_method, cases, together=smoke), strict=True):
        print(name.ljust(16), result, flush=True)
        methods[name] = result
    return methods


def over_links(names, options):
    """Write all figures and the plot; return the summary by name, those of Horovod's own included."""
    from links.plot import plot

    raw = {"tcp_mbit": links.probe(options.speeds)}
    print(f"plain TCP, Mbit/s: {raw['tcp_mbit']}", flush=True)
    raw["methods"] = {}
    for name, method in links.methods({name: METHODS[name] for name in names}).items():
        file = RAW / f"{name.replace(' ', '_')}.jsonl"
        if not options.resume:
            file.unlink(missing_ok=True)
        raw["methods"][name] = links.steps_at_every_speed(name, method, options.speeds, file, options.bucket_mib)
    if not options.steps_only:
        sizes = shapes.resnet50()
        raw["exchange_alone"] = links.beside_the_peer(sizes, options.speeds)
        raw["bytes_by_ranks"] = links.bytes_by_size({name: METHODS[name] for name in names}, sizes)
    steps = {
        name: {speed: result["seconds_per_step"] for speed, result in results.items()}
        for name, results in raw["methods"].items()
    }
    plot(steps, PLOT)
    PLOT.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n")
    summaries = {name: links.summary(results, steps) for name, results in raw["methods"].items()}
    print(steps_table(summaries), flush=True)
    if "bytes_by_ranks" in raw:
        print(bytes_table(raw["bytes_by_ranks"]), flush=True)
    for name, by_size in raw.get("bytes_by_ranks", {}).items():
        summaries[name]["wire_over_payload"] = round(by_size["2"]["sent_bytes"] / by_size["2"]["formula_bytes"], 4)
    return summaries


def steps_table(summaries):
    """Seconds of a step at each speed, how many times faster than Horovod's own in brackets; megabytes.

    Args:
        summaries: By method, see `links.summary`.
    """
    speeds = [key for key, value in next(iter(summaries.values())).items() if isinstance(value, dict)]
    speeds.sort(key=lambda label: float("inf") if label == "unshaped" else int(label.removeprefix("mbit_")))
    heads = ["no limit" if label == "unshaped" else label.removeprefix("mbit_") + " Mbit/s" for label in speeds]
    lines = [head(["seconds a step (times Horovod fp32, fp16)", *heads, "payload MB", "sent MB"])]
    for name, summary in summaries.items():
        cells = [_step(summary[label], name.startswith("Horovod")) for label in speeds]
        lines.append(row([name, *cells, *(f"{summary[f'{what}_bytes'] / 1e6:.3g}" for what in ("payload", "sent"))]))
    return "\n".join(lines)


def bytes_table(table):
    """Megabytes that a rank sends in one exchange, and how many times the formula 2(N-1)/N * payload that is.

    Args:
        table: See `links.bytes_by_size`.
    """
    sizes = sorted({size for by_size in table.values() for size in by_size}, key=int)
    lines = [head(["MB sent (times the formula)", *(f"{size} ranks" for size in sizes)])]
    for name, by_size in table.items():
        lines.append(row([name, *(_sent(by_size[size]) if size in by_size else "" for size in sizes)]))
    return "\n".join(lines)


def _step(result, is_baseline):
    seconds = f"{result['seconds_per_step']:.2f}"
    if is_baseline or "speedup_vs_fp16" not in result:
        return seconds
    return f"{seconds} ({result['speedup_vs_fp32']:.2f}, {result['speedup_vs_fp16']:.2f})"


def _sent(result):
    return f"{result['sent_bytes'] / 1e6:.3f} ({result['sent_bytes'] / result['formula_bytes']:.3f})"


def main():
    parser = command(__doc__, "a minute at the most: three methods, small, no links")
    parser.add_argument("names", nargs="*", help="of METHODS; default: all")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run measured over links")
    parser.add_argument("--speeds", type=speed, nargs="+", default=list(SPEEDS), help="Mbit/s, or none for no limit")
    parser.add_argument(
        "--steps-only", action="store_true", help="neither encoding alone, nor more ranks, nor the peer"
    )
    parser.add_argument("--bucket-mib", type=float, default=8.0, help="of the exchange; default: the configuration's")
    options = parser.parse_args()
    options.names = options.names or list(SMOKE_METHODS if options.smoke else METHODS)
    if unknown := set(options.names) - set(METHODS):
        parser.error(f"unknown methods {sorted(unknown)}: they are {list(METHODS)}")
    local = {} if options.steps_only else encode_decode(options.names, smoke=options.smoke)
    if reason := "a smoke run" if options.smoke else missing():
        print(f"steps over links: skipped, {reason}", flush=True)
        measured = {}
    else:
        measured = over_links(options.names, options)
    keys = [*map(links.label, options.speeds), *FIGURES]
    names = list(links.methods({name: METHODS[name] for name in options.names}))
    methods = {name: dict.fromkeys(keys) | measured.get(name, {}) for name in names}
    for name, results in local.items():
        methods[name]["encode_decode_ms"] = results["encode_decode_ms"]
    print(json.dumps({"methods": methods}))


def speed(text):
    return None if text == "none" else int(text)


if __name__ == "__main__":
    clean_up_on_sigterm()
    main()
