"""`groundswell find-rate`: which learning rate suits a configuration, by a range test on its own global batch."""

import argparse
import math
from collections.abc import Sequence

from conf.schema import RunConfig
from jobs.shell import cli
from jobs.shell.command import Result, read_config, say
from jobs.shell.display import Bar
from jobs.shell.paths import PLOT_MARK, check_outputs, save_plot, with_absolute_paths
from jobs.shell.ranks import ShortageHint, barrier_runner, check_slots
from jobs.shell.records import tags_of, write_run
from jobs.shell.session import spark_session
from pipelines.dataset.format.manifest import Manifest
from pipelines.storage.locations import redacted
from pipelines.tracking.journal.writer import Point, RunWriter, now
from pipelines.tracking.store import runs, store
from pipelines.tracking.store.experiments import chosen_experiment
from pipelines.training import entry
from pipelines.training.driver.checks import batch_text, check_dataset
from pipelines.training.driver.identity import NAMED_DIGITS, training_digest
from pipelines.training.finders.rates import RULE, RangeTest, RatePoint, Suggestion, rising_rates, suggest
from pipelines.training.ranks.events import Compiling, Event, RateTried
from pipelines.training.record.plots import range_test_curve
from pipelines.training.setup.description import dataset_facts, parameters_of
from pipelines.training.setup.rates import peak_learning_rate

_LINES = 15
_BELOW_PEAK, _ABOVE_PEAK = 1e-3, 1e2
"""The default lowest and highest rate, as parts of the configured peak."""


def find_rate(config: RunConfig, rates: Sequence[float], result: Result) -> RangeTest:
    """Take a step at each rate on the configured workers, and record the losses as a run of the experiment.

    Args:
        config: Dataset, model, optimizer and workers; the schedule is not used.
        rates: Rising learning rates.
        result: Filled in while the job runs.
    """
    is_lock_step = config.training.mode.declaration.is_lock_step
    config = with_absolute_paths(config if is_lock_step else config.with_synchronous_mode())
    result.dataset = config.dataset.path
    manifest = check_dataset(config)
    runs.check_store(chosen_experiment(config.tracking.experiment))  # before Spark, which takes seconds to start
    with spark_session(
        "groundswell find-rate", config.launch.master, gpus_per_worker=config.launch.gpus_per_worker
    ) as spark:
        check_slots(spark, config.launch)
        store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
        run = _started(config, manifest)
        with runs.ended(run):
            say(f"MLflow run {run.run_id} in {redacted(run.uri)}")
            result.run_id = run.run_id
            result.save()
            bar, shortage = Bar("step"), ShortageHint(config)

            def on_event(event: Event) -> None:
                _show(bar, event)
                shortage.take(event)

            runner = barrier_runner(
                spark,
                config.launch,
                description=f"groundswell find-rate: {config.tracking.run_name or 'range test'}",
                on_event=on_event,
            )
            try:
                test: RangeTest = runner.run(entry.run_range_test, config, list(rates))
            except BaseException as error:
                shortage.say(error)
                raise
            finally:
                bar.close()
            _record(run, test)
    return test


def table(points: Sequence[RatePoint], suggestion: Suggestion | None) -> list[str]:
    """Return the rate and the losses at every fifteenth of the test and at its last steps, as lines of text."""
    every = max(1, round(len(points) / _LINES))
    marks = {} if suggestion is None else {"steepest": suggestion.steepest, "lowest": suggestion.lowest}
    lines = [f"{'step':>6} {'rate':>12} {'loss':>10} {'smoothed':>10}"]
    for step, point in enumerate(points):
        notes = [name for name, rate in marks.items() if rate == point.rate]
        if notes or step % every == 0 or step == len(points) - 1:
            text = f"{step:>6} {point.rate:>12.4g} {point.loss:>10.4f} {point.smoothed:>10.4f}  {', '.join(notes)}"
            lines.append(text.rstrip())
    return lines


def conclusion(config: RunConfig, test: RangeTest, suggestion: Suggestion | None) -> list[str]:
    """Return the rate that the test suggests, and its setting, as lines of text."""
    ended = "the loss diverged" if test.diverged else "the loss did not diverge: a higher --high may show more"
    if suggestion is None:
        return [f"no suggestion: the smoothed loss never fell; {ended}. Give a lower --low, or more --steps"]
    if config.optimizer.learning_rate is None:
        # The rate at 256 is proportional to the rate, whichever law scales it.
        key, per_256 = "learning_rate_per_256", config.optimizer.learning_rate_per_256
        assert per_256 is not None
        value = per_256 * suggestion.rate / peak_learning_rate(config.optimizer, config.global_batch_size)
    else:
        key, value = "learning_rate", suggestion.rate
    return [
        f"{len(test.points)} steps of {config.global_batch_size:,} samples ({batch_text(config)}); {ended}",
        f"suggestion: a peak of {suggestion.rate:.3g}, which is --set optimizer.{key}={value:.3g}",
        f"rule: {RULE}",
    ]


def _show(bar: Bar, event: Event) -> None:
    """Show an event of rank 0 in the test."""
    match event:
        case Compiling():
            say("compiling the training step, which takes a minute or two with some codecs")
        case RateTried(step=step, steps=steps):
            text = f"rate {event.rate:.3g}, smoothed loss {event.smoothed_loss:.4f}"
            bar.move("range test", step, steps, text, f"step {step}/{steps}: {text}")


def _started(config: RunConfig, manifest: Manifest) -> store.TrackedRun:
    """Create a run for the test."""
    return runs.start_run(
        chosen_experiment(config.tracking.experiment),
        config.tracking.run_name or f"range test {training_digest(config, manifest.fingerprint)[:NAMED_DIGITS]}",
        parameters_of(config, manifest),
        {**tags_of("find-rate"), "dataset_fingerprint": manifest.fingerprint},
        dataset=dataset_facts(config.dataset.path, manifest),
    )


def _record(run: store.TrackedRun, test: RangeTest) -> None:
    suggestion = suggest(test.points)
    curves = {
        "loss": [point.loss for point in test.points],
        "smoothed_loss": [point.smoothed for point in test.points],
        "learning_rate": [point.rate for point in test.points],
    }
    measured = now()
    finite = {
        f"range_test/{name}": [Point(step, value, measured) for step, value in enumerate(curve) if math.isfinite(value)]
        for name, curve in curves.items()
    }

    def write(writer: RunWriter) -> None:
        writer.curves(finite)
        writer.figure(range_test_curve(test.points, suggestion), "range_test.png")
        writer.tags({"range_test.suggestion": f"{suggestion.rate:.6g}" if suggestion else "none"})

    if reason := write_run(run, write):
        say(f"MLflow did not take the range test: {reason}")


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Test as the command line says."""
    if arguments.plot is not None:
        check_outputs(f"--plot {arguments.plot}", {arguments.plot: PLOT_MARK})
    config = read_config(arguments)
    peak = peak_learning_rate(config.optimizer, config.global_batch_size)
    low = peak * _BELOW_PEAK if arguments.low is None else arguments.low
    high = peak * _ABOVE_PEAK if arguments.high is None else arguments.high
    test = find_rate(config, rising_rates(low, high, arguments.steps), result)
    suggestion = suggest(test.points)
    say(*table(test.points, suggestion), *conclusion(config, test, suggestion))
    if suggestion is not None:
        result.metrics = {"learning_rate": suggestion.rate}
    if arguments.plot is not None:
        save_plot(range_test_curve(test.points, suggestion), arguments.plot)
        say(f"plot {arguments.plot}")


if __name__ == "__main__":
    cli.main("find-rate")
