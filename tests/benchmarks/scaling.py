"""The scaling model against measurements: steps of 3, 4 and 8 ranks from 2, and published tables from two rows.

    make bench NAME=scaling
    make bench NAME=scaling ARGS="--ranks 8 --resume"
    make bench NAME=scaling ARGS=--smoke

The first part runs ranks in network namespaces with links of 100 Mbit/s and 1 Gbit/s. This machine has fewer cores than
ranks, so computing is a *sleep* at every number of ranks. It is as long as a step of a ResNet-50 takes here at batch 4
by `make bench NAME=network`. Gradients are ready, bucket by bucket, at the moments that were measured there. A second
thread serves the exchange while the first one sleeps. The exchange is real: codec, buckets, Horovod on Gloo; its
gradients are 18 MB, as the memory of 8 ranks with 94 MB each is more than a machine may have. Every rank has the same
*quota* of processor at every number of ranks (cgroup). So 8 ranks on 2 cores encode as fast as 2 do. The model is
fitted at 2 ranks: collectives alone, encoding and decoding, and what a step takes beyond them. Then it predicts all
others. It needs root. The ranks of a number are measured together; `--resume` keeps those in `outputs/scaling.json`,
and with `--ranks` and no number nothing is measured again.

The second part fits published tables, which are read from `../shared/research` and are no part of this project, see
`links/published.py`. Errors are signed, prediction over measurement less 1.

The last line is JSON: `mean_error` and `worst_error`, of the absolute errors of 3 and more ranks on links, and
`tables`, the mean absolute error of each published table; null with `reasons` where it was not measured. `--smoke` has
no links, and the tables where they are.
"""

import json
import math
import statistics
from pathlib import Path

from links import alone, shapes

from tests.benchmarks.parts.command import clean_up_on_sigterm, command
from tests.benchmarks.parts.ranks import on_ranks

PROJECT = Path(__file__).parents[2]
RAW = PROJECT / "outputs" / "scaling.json"
RESULTS = Path(__file__).parent / "results"
NETWORK = RESULTS / "network.json"
PUBLISHED = PROJECT.parent / "shared" / "research"
RANKS = (2, 3, 4, 8)
SHARE = 0.2
CODECS = {"none": {}, "onebit": {}, "powersgd": {"rank": 4}, "qsgd": {"bits": 4}, "topk": {"density": 0.01}}


def computing(file):
    """Seconds of a step's computing, and when each of the scaled gradients is ready, from the measured network.

    A gradient is ready when as large a part of the bytes is as in the network.
    """
    from links.shaped import BATCH

    from pipelines.scaling.fit import fit
    from pipelines.scaling.measurements import read_measurements
    from pipelines.scaling.step import compute_seconds

    measurements = read_measurements(file)
    sizes = [math.prod(shape) for shape in shapes.SCALED]
    ready, done = [], 0
    for size in reversed(sizes):
        done += size
        ready.append(_ready_at(measurements.gradients, done / sum(sizes)))
    return {"seconds": round(compute_seconds(fit(measurements).worker, BATCH), 4), "ready": ready}


def _ready_at(gradients, share):
    wanted, done = share * sum(gradient.bytes for gradient in gradients), 0
    for gradient in gradients:
        done += gradient.bytes
        if done >= wanted - 1:
            return gradient.ready
    return gradients[-1].ready


def over_links(options):
    """What was measured of each number of ranks, kept ones included."""
    from links.shaped import measure

    kept = json.loads(RAW.read_text()) if options.resume and RAW.exists() else []
    if 2 not in [*options.ranks, *(each["ranks"] for each in kept)]:
        raise ValueError("nothing is measured of 2 ranks, to which the model is fitted: add 2 to --ranks")
    compute = computing(options.measurements)
    print(f"computing is a sleep of {compute['seconds']} s, gradients ready at {compute['ready']}", flush=True)
    for ranks in options.ranks:
        kept = [each for each in kept if each["ranks"] != ranks]
        kept.append(measure(ranks, CODECS, compute, SHARE) | {"compute": compute})
        RAW.parent.mkdir(parents=True, exist_ok=True)
        RAW.write_text(json.dumps(sorted(kept, key=lambda each: each["ranks"]), indent=1) + "\n")
    return sorted(kept, key=lambda each: each["ranks"])


def messages_of(codecs):
    """By codec what its exchange of the scaled gradients sends."""
    found = [on_ranks(1, alone.codec, name, parameters, 0, shapes.SCALED)[0] for name, parameters in codecs.items()]
    return {answer["name"]: {key: answer[key] for key in ("messages", "dense_bytes")} for answer in found}


def beside_the_rule(rows):
    """Rows with the error of the trivial rule: N ranks take as long as 2."""
    of_two = {(row["link"], row["codec"]): row["measured"] for row in rows if row["ranks"] == 2}
    return [{**row, "rule_error": of_two[row["link"], row["codec"]] / row["measured"] - 1} for row in rows]


def shown(rows):
    """Print the table of the steps, and return the absolute errors of 3 and more ranks: ours, and the rule's."""
    print(f"{'ranks':>5} {'link':10} {'codec':10} {'measured s':>10} {'predicted s':>11} {'error':>8} {'rule':>10}")
    for row in rows:
        fitted = "  fitted here" if row["ranks"] == 2 else ""
        print(
            f"{row['ranks']:>5} {row['link']:10} {row['codec']:10} {row['measured']:>10.3f} {row['predicted']:>11.3f} "
            f"{100 * row['error']:>+7.1f} % {100 * row['rule_error']:>+7.1f} %{fitted}",
            flush=True,
        )
    return [[abs(row[name]) for row in rows if row["ranks"] > 2] for name in ("error", "rule_error")]


def tables():
    """Mean absolute error of each published table, and the reason where they are not there."""
    from links import published

    if reason := published.missing(PUBLISHED):
        return dict.fromkeys(published.NAMES), reason
    found = published.predictions(PUBLISHED)
    for name, rows in found.items():
        for row in rows:
            print(
                f"{name:24} {row['what']:28} measured {row['measured']:>9.4g} s, predicted {row['predicted']:>9.4g} s, "
                f"{100 * row['error']:>+7.1f} %",
                flush=True,
            )
    means = {name: statistics.mean(abs(row["error"]) for row in rows) for name, rows in found.items()}
    return {name: round(value, 4) for name, value in means.items()}, None


def main():
    """Measure, predict, compare, and print the JSON line."""
    parser = command(__doc__, "the published tables alone")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS), choices=RANKS, help="default: all")
    parser.add_argument("--measurements", type=Path, default=NETWORK, help="of make bench NAME=network")
    parser.add_argument("--resume", action="store_true", help="keep the numbers of ranks that were measured before")
    options = parser.parse_args()
    from links import network, shaped
    from links.plot import plot_scaling

    errors, of_rule, reasons = [], [], {}
    if options.smoke:
        reasons["links"] = "a smoke run"
    elif reason := network.missing() or shaped.missing():
        reasons["links"] = reason
    elif not options.measurements.exists():
        reasons["links"] = f"{options.measurements} is not there: make bench NAME=network makes it"
    else:
        measured = over_links(options)
        measurements = shaped.measurements_of(measured[0], measured[0]["compute"], messages_of(CODECS))
        rows = beside_the_rule(shaped.rows_of(measured, measurements))
        errors, of_rule = shown(rows)
        (RESULTS / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
        plot_scaling(rows, RESULTS / "scaling.png")
    means, reason = tables()
    if reason:
        reasons["tables"] = reason
    last = {
        "mean_error": round(statistics.mean(errors), 4) if errors else None,
        "worst_error": round(max(errors), 4) if errors else None,
        "rule_mean_error": round(statistics.mean(of_rule), 4) if of_rule else None,
        "rule_worst_error": round(max(of_rule), 4) if of_rule else None,
        "tables": means,
        "reasons": reasons,
    }
    print(json.dumps(last))


if __name__ == "__main__":
    clean_up_on_sigterm()
    main()
