"""`groundswell estimate`: step time, efficiency, time and cost on more workers, predicted from measurements."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.sections.section import refuse
from jobs.shell import cli
from jobs.shell.command import Result, say
from jobs.shell.paths import PLOT_MARK, check_outputs, save_plot
from pipelines.scaling.estimate import (
    CSV_MARK,
    STRONG,
    WEAK,
    Job,
    Network,
    Row,
    csv_of,
    fastest,
    figure_of,
    lines_of,
    predict,
)
from pipelines.scaling.fit import Parameters, fit, resampled, wires_on
from pipelines.scaling.measurements import Measurements, read_measurements
from pipelines.scaling.named_link import NamedLink
from pipelines.scaling.recorded import PHASES, RECORDED_LINK, combined, measurements_of
from pipelines.scaling.step import Topology
from pipelines.storage.whole_files import os_errors_as, write_whole

_DRAWS = 200
_DENSE = "none"


@dataclass(frozen=True)
class Hosts:
    """The hosts of the workers and their links, from the command line."""

    link: NamedLink | None
    """The link between hosts; None: the link of the recorded trainings."""
    local_link: NamedLink | None
    workers_per_host: int

    def network(self, parameters: Parameters) -> Topology:
        """Return the topology of one fit."""
        if self.link is None:
            return Topology(parameters.links[RECORDED_LINK].wires)
        measured = {name: link for name, link in parameters.links.items() if name != RECORDED_LINK}
        inside = None if self.local_link is None else wires_on(self.local_link, measured)
        return Topology(wires_on(self.link, measured), inside, self.workers_per_host)


def collect(file: Path | None, run_ids: Sequence[str]) -> Measurements:
    """Read a file of measurements, recorded trainings, or both.

    Raises:
        FileNotFoundError, ValueError: As `read_measurements` and `measurements_of`, or the store has no such run.
        TrackingError: MLflow does not answer.
    """
    measured = None if file is None else read_measurements(file)
    if run_ids:
        # MLflow takes seconds to import, and a file does not need it.
        from pipelines.tracking.store.recorded import recorded_training

        recorded = measurements_of([recorded_training(run, groups=(), metrics=PHASES) for run in run_ids])
        measured = recorded if measured is None else combined(measured, recorded)
    if measured is None:
        raise ValueError("nothing to predict from: name --measurements FILE (make bench NAME=network) or --run ID")
    return measured


def notes_of(measurements: Measurements, rows: Sequence[Row], *, intervals: bool) -> list[str]:
    """Return the notes that a reader of the predictions needs."""
    low, high = (f(point.batch_size for point in measurements.compute) for f in (min, max))
    outside = sorted({row.batch_size for row in rows if not low <= row.batch_size <= high})
    notes = [
        "predicted by a model, not measured; the model's own errors: tests/benchmarks/RESULTS.md",
        f"measured: {measurements.model}, {measurements.machine}, {measurements.measured}",
        "interval: 95 % of the predictions from repeats drawn again (bootstrap), not the model's own error"
        if intervals
        else "no intervals: everything was measured once",
    ]
    if len(measurements.compute) == 1:
        notes.append(f"one batch was measured ({low}): all of a step's computing is taken as proportional to the batch")
    if outside:
        shown = f"{outside[0]:,}" if len(outside) == 1 else f"{outside[0]:,} to {outside[-1]:,}"
        notes.append(f"batches of {shown} per worker lie outside of those measured, {low:,} to {high:,}")
    return notes


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Predict as the command line says."""
    folder: Path = arguments.output
    table, picture = folder / "estimate.csv", folder / "estimate.png"
    check_outputs(f"--output {folder}", {table: CSV_MARK, picture: PLOT_MARK})
    measurements = collect(arguments.measurements, arguments.run)
    hosts, job, batches = _hosts(arguments, measurements), _job(arguments), _batches(arguments)
    parameters, draws = fit(measurements), resampled(measurements, _DRAWS)
    codecs = _codecs(arguments.codec, list(parameters.codecs))
    bucket = None if arguments.bucket_mib == "none" else float(arguments.bucket_mib)
    with os_errors_as(ValueError, f"--output {folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    found = {
        kind: predict(parameters, draws, hosts.network, kind, batch, arguments.workers, codecs, bucket, job)
        for kind, batch in batches.items()
    }
    rows = [row for each in found.values() for row in each]
    if not rows:
        raise ValueError(
            f"--workers {min(arguments.workers)} are more than the images of --global-batch-size "
            f"{arguments.global_batch_size}: nothing to predict"
        )
    title = f"{measurements.model}, {hosts.link.label if hosts.link else 'link of the recorded trainings'}"
    say(*notes_of(measurements, rows, intervals=draws is not None))
    for kind, each in found.items():
        say("", f"{kind} scaling, predicted: {title}, buckets of {arguments.bucket_mib} MiB", *lines_of(each, _DENSE))
        if each:
            most = max(row.workers for row in each)
            say(_fastest_line(parameters, hosts.network, kind, batches[kind], most, codecs, bucket))
    with os_errors_as(ValueError, f"--output {folder} cannot be written"):
        write_whole(table, csv_of(rows).encode())
        save_plot(figure_of(rows, title), picture)
    say("", f"table   {table}", f"picture {picture}")
    last = min((row for row in rows if row.workers == max(row.workers for row in rows)), key=lambda row: row.seconds)
    result.metrics = {"predicted/step_seconds": last.seconds, "predicted/images_per_second": last.images_per_second}


def _fastest_line(
    parameters: Parameters,
    network: Network,
    scaling: str,
    batch: int,
    workers: int,
    codecs: Sequence[str],
    bucket: float | None,
) -> str:
    best = fastest(
        parameters, network, scaling, batch, workers, {name: parameters.codecs[name] for name in codecs}, bucket
    )
    assert best is not None, "there is a row of as many workers"
    size = "null" if best.bucket_mib is None else f"{best.bucket_mib:g}"
    # A recorded training does not say when each gradient was ready: all gradients are one bucket.
    knows_buckets = len(parameters.worker.gradients) > 1
    settings = f"exchange.codec={best.codec}" + f" exchange.bucket_mib={size}" * knows_buckets
    unknown = "" if knows_buckets else "; --measurements tells which size of buckets too"
    return f"fastest at {workers:,} workers, predicted: {settings}, {best.seconds:.4g} s a step{unknown}"


def _batches(arguments: argparse.Namespace) -> dict[str, int]:
    batches = {STRONG: arguments.global_batch_size, WEAK: arguments.batch_size_per_worker}
    given = {kind: batch for kind, batch in batches.items() if batch is not None}
    if not given:
        raise ValueError("no batch: name --global-batch-size (strong scaling), --batch-size-per-worker (weak), or both")
    return given


def _hosts(arguments: argparse.Namespace, measurements: Measurements) -> Hosts:
    recorded = any(link.name == RECORDED_LINK for link in measurements.links)
    refuse(
        (
            arguments.link is None and not recorded,
            "--link is missing: say what is between the hosts, such as 1Gbit/s or 1Gbit/s,50us",
        ),
        (
            (arguments.local_link is None) != (arguments.workers_per_host == 1),
            "--workers-per-host above 1 and --local-link belong together: name both or neither",
        ),
        (
            arguments.local_link is not None and arguments.link is None,
            "--local-link has no effect without --link, the one between the hosts",
        ),
    )
    return Hosts(arguments.link, arguments.local_link, arguments.workers_per_host)


def _job(arguments: argparse.Namespace) -> Job:
    refuse(
        (
            (arguments.images is None) != (arguments.epochs is None),
            "--images and --epochs belong together: the time of a training needs both",
        ),
        (
            arguments.price is not None and arguments.images is None,
            "--price has no effect without --images and --epochs: the cost is that of a training",
        ),
    )
    return Job(arguments.images, arguments.epochs, arguments.price)


def _codecs(wanted: Sequence[str], known: Sequence[str]) -> list[str]:
    refuse(
        *(
            (name not in known, f"--codec {name} was not measured: expected one of {', '.join(known)}")
            for name in wanted
        )
    )
    return list(dict.fromkeys(wanted)) or list(known)


if __name__ == "__main__":
    cli.main("estimate")
