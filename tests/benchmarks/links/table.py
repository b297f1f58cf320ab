"""The figures as Markdown, for RESULTS.md."""


def steps_table(summaries):
    """Seconds of a step at each speed, how many times faster than Horovod's own in brackets; megabytes.

    Args:
        summaries: By method, see `measure.summary`.
    """
    speeds = [key for key, value in next(iter(summaries.values())).items() if isinstance(value, dict)]
    speeds.sort(key=lambda label: float("inf") if label == "unshaped" else int(label.removeprefix("mbit_")))
    heads = ["no limit" if label == "unshaped" else label.removeprefix("mbit_") + " Mbit/s" for label in speeds]
    lines = [
        _row(["seconds a step (times Horovod fp32, fp16)", *heads, "payload MB", "sent MB"]),
        _rule(len(heads) + 3),
    ]
    for name, summary in summaries.items():
        cells = [_step(summary[label], name.startswith("Horovod")) for label in speeds]
        lines.append(
            _row([name, *cells, f"{summary['payload_bytes'] / 1e6:.3g}", f"{summary['sent_bytes'] / 1e6:.3g}"])
        )
    return "\n".join(lines)


def bytes_table(table):
    """Megabytes that a rank sends in one exchange, and how many times the formula 2(N-1)/N * payload that is.

    Args:
        table: See `measure.bytes_by_size`.
    """
    sizes = sorted({size for by_size in table.values() for size in by_size}, key=int)
    lines = [_row(["MB sent (times the formula)", *[f"{size} ranks" for size in sizes]]), _rule(len(sizes) + 1)]
    for name, by_size in table.items():
        cells = [_sent(by_size[size]) if size in by_size else "" for size in sizes]
        lines.append(_row([name, *cells]))
    return "\n".join(lines)


def _step(result, is_baseline):
    seconds = f"{result['seconds_per_step']:.2f}"
    if is_baseline or "speedup_vs_fp16" not in result:
        return seconds
    return f"{seconds} ({result['speedup_vs_fp32']:.2f}, {result['speedup_vs_fp16']:.2f})"


def _sent(result):
    return f"{result['sent_bytes'] / 1e6:.3f} ({result['sent_bytes'] / result['formula_bytes']:.3f})"


def _row(cells):
    return f"| {' | '.join(cells)} |"


def _rule(columns):
    return "|" + "---|" * columns
