"""The figures as Markdown, for RESULTS.md."""

from tests.benchmarks.parts.figures import head, row


def steps_table(summaries):
    """Seconds of a step at each speed, how many times faster than Horovod's own in brackets; megabytes.

    Args:
        summaries: By method, see `measure.summary`.
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
        table: See `measure.bytes_by_size`.
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
