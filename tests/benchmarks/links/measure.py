"""What is measured between hosts: steps at every speed, bytes against the number of ranks, and the peer."""

import json
import math
import os
import statistics
from pathlib import Path

from links import shapes
from links.network import Hosts
from links.ring import Ring

from tests.benchmarks.parts.figures import slowest

WARMUP_STEPS = 3
"""The first traces and compiles, PyTorch's hook and 1-bit Adam begin with dense ones."""
STEPS, MOST_STEPS, STEPS_IF_SLOW = 3, 9, 2
TIMED_SECONDS, SLOW_SECONDS = 5.0, 10.0
IDLE_SECONDS = 2.0
HOROVOD = {"Horovod fp32": {"horovod": "none"}, "Horovod fp16": {"horovod": "fp16"}}
# One in a thousand of this network's elements has grown beyond it at a step, residuals included.
TAU = 0.1
SIZES = (2, 4, 8)
# Ranks talk to each other in every cycle, of 1 ms by default: that would be most of what small payloads send.
LONG_CYCLES = {"HOROVOD_CYCLE_TIME": "1000"}
# Without a limit the bridge drops frames, by the hundred, which then travel twice.
LOSSLESS_MBIT = 1000
SCALED_METHODS = ("none", "fp16", "onebit", "qsgd", "topk 1 %", "powersgd")
TORCH = "GROUNDSWELL_TORCH"


def label(mbit):
    return "unshaped" if mbit is None else f"mbit_{mbit}"


def methods(codecs):
    """Settings of the ranks by name, Horovod's own first: everything is told as a ratio to them.

    Args:
        codecs: Parameters by name; the codec is the name's first word.
    """
    ours = {}
    for name, parameters in codecs.items():
        codec = name.split()[0]
        ours[name] = {"codec": codec, "parameters": parameters}
        if codec == "threshold":
            ours[name]["parameters"] = {"tau": TAU}
        if codec == "onebit_adam":
            ours[name]["warmup_steps"] = 1
    return {**HOROVOD, **ours}


def probe(speeds):
    """Mbit/s that plain TCP reaches at each speed."""
    with Hosts(2) as hosts:
        reached = {}
        for mbit in speeds:
            hosts.shape(mbit)
            reached[label(mbit)] = round(hosts.throughput(), 1)
        return reached


def steps_at_every_speed(name, method, speeds, file, bucket_mib=None):
    """Append a line of JSON for every speed that `file` does not have yet; return all, by label."""
    done = read(file, bucket_mib)
    missing = [mbit for mbit in speeds if label(mbit) not in done]
    if not missing:
        return done
    file.parent.mkdir(parents=True, exist_ok=True)
    with Hosts(2) as hosts, Ring(hosts, {"kind": "step", "method": method, "bucket_mib": bucket_mib}) as ring:
        ring.ask(steps=WARMUP_STEPS)
        idle = statistics.mean(answer["sent_bytes"] for answer in ring.ask(idle=IDLE_SECONDS)) / IDLE_SECONDS
        for mbit in missing:
            hosts.shape(mbit)
            result = {"speed": label(mbit), "bucket_mib": bucket_mib, "idle_bytes_per_second": idle}
            result |= timed_steps(ring)
            with file.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            done[result["speed"]] = result
            print(f"{name:16} {result['speed']:9} {_told(result)}", flush=True)
    return done


def read(file, bucket_mib):
    """Results by label of the speed, those with these buckets."""
    if not file.exists():
        return {}
    results = [json.loads(line) for line in file.read_text().splitlines()]
    return {result["speed"]: result for result in results if result["bucket_mib"] == bucket_mib}


def summary(results, steps):
    """Of one method: at each speed seconds, and how many times faster than Horovod's own; bytes beside payload.

    `step_wire_over_payload` is the counter's, of steps without limit, nothing subtracted. Horovod's ranks talk to each
    other in every cycle of its loop, whether there is work or not: `control_bytes_per_second`, measured between steps.
    Where the payload is small, that is what the ratio shows.
    """
    summarised = {}
    for speed, result in results.items():
        seconds = result["seconds_per_step"]
        summarised[speed] = {"seconds_per_step": round(seconds, 4)}
        for key, baseline in (("speedup_vs_fp32", "Horovod fp32"), ("speedup_vs_fp16", "Horovod fp16")):
            if speed in steps[baseline]:
                summarised[speed][key] = round(steps[baseline][speed] / seconds, 3)
    any_result = results.get("unshaped") or next(iter(results.values()))
    summarised["step_wire_over_payload"] = round(any_result["sent_over_payload"], 4)
    summarised["sent_bytes"] = round(any_result["sent_bytes_per_step"])
    summarised["payload_bytes"] = round(any_result["payload_bytes_per_step"])
    summarised["control_bytes_per_second"] = round(any_result["idle_bytes_per_second"])
    return summarised


def bytes_by_size(codecs, pair_shapes):
    """Bytes that a rank sends in one exchange of gradients, the mean over ranks; all methods between two.

    Horovod's cycles are long for it, `LONG_CYCLES`, so that its control traffic hardly counts.

    Args:
        codecs: Parameters by name.
        pair_shapes: Of the gradients between two ranks; between more they are `shapes.SCALED`.

    Returns:
        Bytes by name and number of ranks. `sent_bytes` is the interface's counter, all control traffic included.
        `payload_bytes` is the exchange's own count. Beside them stand the formula 2(N-1)/N of that, what gathering all
        payloads would cost, and what the formula gives for float32.
    """
    table = {name: {} for name in codecs}
    for size in SIZES:
        sizes = pair_shapes if size == SIZES[0] else shapes.SCALED
        dense = 4 * sum(map(math.prod, sizes))
        names = [name for name in codecs if size == SIZES[0] or name in SCALED_METHODS]
        for name in names:
            settings = {"kind": "exchange", "method": {**methods(codecs)[name], "shapes": sizes}}
            # New ranks for each: Horovod's talk about every tensor that they ever had.
            with Hosts(size) as hosts, Ring(hosts, settings, environment=LONG_CYCLES) as ring:
                hosts.shape(LOSSLESS_MBIT)
                ring.ask(steps=WARMUP_STEPS)
                answers = ring.ask(steps=STEPS)
            payload = statistics.mean(statistics.mean(answer["payload_bytes"]) for answer in answers)
            table[name][str(size)] = {
                "sent_bytes": round(statistics.mean(answer["sent_bytes"] / STEPS for answer in answers)),
                "payload_bytes": round(payload),
                "formula_bytes": round(2 * (size - 1) / size * payload),
                "gathered_bytes": round((size - 1) * payload),
                "dense_bytes": round(2 * (size - 1) / size * dense),
            }
            print(f"{name:16} {size} ranks   {table[name][str(size)]}", flush=True)
    return table


def beside_the_peer(sizes, speeds):
    """Seconds and bytes of the exchange alone, ours and PyTorch's, PowerSGD of rank 4 and dense.

    Returns:
        By name and speed; None where there is no PyTorch.
    """
    torch = os.environ.get(TORCH)
    if not torch:
        print(f"PyTorch's PowerSGD hook: skipped, {TORCH}=<folder with torch> is not set", flush=True)
        return None
    powersgd = {"codec": "powersgd", "parameters": {"rank": 4}, "shapes": sizes}
    dense = {"codec": "none", "parameters": {}, "shapes": sizes}
    script = {"script": Path(__file__).with_name("torch_rank.py"), "environment": {"PYTHONPATH": torch}}
    contestants = {
        "powersgd": ({"kind": "exchange"}, powersgd, {}),
        "PyTorch PowerSGD hook": ({}, {"rank": 4, "shapes": sizes}, script),
        "none": ({"kind": "exchange"}, dense, {}),
        "PyTorch allreduce hook": ({}, {"rank": 0, "shapes": sizes}, script),
    }
    results = {}
    for name, (settings, method, options) in contestants.items():
        results[name] = {}
        with Hosts(2) as hosts, Ring(hosts, {**settings, "method": method}, **options) as ring:
            ring.ask(steps=WARMUP_STEPS)
            for mbit in speeds:
                hosts.shape(mbit)
                results[name][label(mbit)] = result = timed_steps(ring)
                print(f"{name:24} exchange alone {label(mbit):9} {_told(result)}", flush=True)
    return results


def timed_steps(ring):
    """The median of a few steps, after one that fills the connections' windows at this speed."""
    (first,) = slowest(ring.ask(steps=1))
    steps = min(MOST_STEPS, max(STEPS, round(TIMED_SECONDS / first)))
    if first > SLOW_SECONDS:
        steps = STEPS_IF_SLOW
    answers = ring.ask(steps=steps)
    seconds = slowest(answers)
    result = {
        "seconds_per_step": statistics.median(seconds),
        "seconds": seconds,
        "sent_bytes_per_step": statistics.mean(answer["sent_bytes"] / steps for answer in answers),
    }
    if answers[0].get("payload_bytes"):
        payload = statistics.mean(statistics.mean(answer["payload_bytes"]) for answer in answers)
        result |= {
            "payload_bytes_per_step": payload,
            "elapsed_seconds_per_step": answers[0]["elapsed_seconds"] / steps,
            "sent_over_payload": result["sent_bytes_per_step"] / payload,
            "parts": answers[0]["parts"],
        }
    return result


def _told(result):
    text = f"{result['seconds_per_step']:7.3f} s, {result['sent_bytes_per_step'] / 1e6:7.3f} MB sent"
    if "payload_bytes_per_step" in result:
        text += f" for a payload of {result['payload_bytes_per_step'] / 1e6:7.3f} MB"
    return text
