"""`groundswell check`: checks everything about a training that needs no training step."""

import argparse
from collections.abc import Callable
from contextlib import closing

from conf.schema import RunConfig
from conf.sections.section import refuse
from jobs.shell import cli
from jobs.shell.command import USER_ERROR, Result, exit_code, message_of, read_config, say
from jobs.shell.display import Bar
from jobs.shell.paths import with_absolute_paths
from jobs.shell.ranks import barrier_runner, check_slots
from jobs.shell.session import spark_session
from jobs.train import experiment_of_new_run, with_run_to_resume
from pipelines.dataset.read.verify import CheckProgress, verify_dataset
from pipelines.launch.driver.preflight import check_encryption
from pipelines.machine.console import counted
from pipelines.storage.locations import absolute_location
from pipelines.tracking.store import store
from pipelines.tracking.store.runs import check_store
from pipelines.training import entry
from pipelines.training.driver.checks import batch_text, check_dataset, check_output, check_resume

_NAME_WIDTH = 15


class Checklist:
    """Runs checks one after the other; a problem does not stop the next check."""

    def __init__(self) -> None:
        """Start without results."""
        self._codes: list[int] = []

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Print a line: `ok` with the text of the check, or `problem` with its error."""
        try:
            say(f"ok       {name:<{_NAME_WIDTH}}{check()}")
        except Exception as error:
            self._codes.append(exit_code(error))
            say(f"problem  {name:<{_NAME_WIDTH}}{message_of(error)}")

    def finish(self) -> None:
        """Raise an error if there were problems.

        Raises:
            ValueError: The user must correct at least one problem.
            RuntimeError: The infrastructure caused all problems.
        """
        if self._codes:
            text = f"{len(self._codes)} problem{'s' * (len(self._codes) > 1)}, see above"
            raise ValueError(text) if USER_ERROR in self._codes else RuntimeError(text)


def check_training(config: RunConfig, checklist: Checklist) -> None:
    """Check what a training with this configuration needs.

    Args:
        config: The configuration; its paths are absolute.
        checklist: Runs the checks.
    """
    checklist.run(
        "configuration",
        lambda: (
            f"{config.model.name}, {config.optimizer.name}, codec {config.exchange.codec.name}, "
            f"{counted(config.training.epochs, 'epoch')}, {batch_text(config)} samples"
        ),
    )
    if config.training.resume_run == "latest":
        config = _with_run_to_resume(config, checklist)
    checklist.run("dataset", lambda: _check_dataset(config))
    checklist.run("storage", lambda: _check_output(config))
    checklist.run(
        "tracking",
        lambda: (
            "not used: tracking.offline=true" if config.tracking.offline else check_store(experiment_of_new_run(config))
        ),
    )
    checklist.run("cluster", lambda: _check_cluster(config))


def _with_run_to_resume(config: RunConfig, checklist: Checklist) -> RunConfig:
    """Return the configuration with the run that `latest` means; a missing run is a problem."""
    found = config.with_values(training={"resume_run": None})

    def look() -> str:
        nonlocal found
        found = with_run_to_resume(config)
        return f"training.resume_run={found.training.resume_run}"

    checklist.run("resume", look)
    return found


def check_rows(dataset: str) -> str:
    """Read every row of a dataset; return a text with their number.

    Raises:
        FileNotFoundError: The dataset does not exist.
        ValueError: The dataset is damaged; the message has a line for each damaged shard.
    """
    with closing(Bar("row")) as bar:

        def show(progress: CheckProgress) -> None:
            damaged = f"{progress.damaged_shards} damaged shards"
            bar.move("", progress.done, progress.total, damaged, f"{progress.done}/{progress.total} rows, {damaged}")

        found = verify_dataset(absolute_location(dataset), progress=show)
    if not found.is_whole:
        raise ValueError("\n         ".join([f"{dataset} is damaged:", *map(str, found.damaged), *found.problems]))
    return f"{dataset}: {found.rows:,} rows in {found.shards:,} shards are whole"


def _check_dataset(config: RunConfig) -> str:
    manifest = check_dataset(config)
    check_resume(config, manifest)
    rows = ", ".join(f"{split} {info.rows:,}" for split, info in manifest.splits.items())
    return f"{config.dataset.path}: {rows} samples, {counted(len(manifest.class_names), 'class')}"


def _check_output(config: RunConfig) -> str:
    check_output(config.training, config.dataset.path)
    return f"{config.training.output} can be written"


def _check_cluster(config: RunConfig) -> str:
    launch = config.launch
    with spark_session("groundswell check", launch.master, gpus_per_worker=launch.gpus_per_worker) as spark:
        check_encryption(spark, config.launch.accept_unencrypted)
        check_slots(spark, config.launch)
        if not config.tracking.offline:
            store.check_workers_reach(store.tracking_uri(), spark.sparkContext.master)
        # Every rank runs the launcher's own checks, and then those of its environment.
        runner = barrier_runner(spark, config.launch, description="groundswell check", log_to_driver="none")
        sites: list[entry.HostReport] = runner.run_all(entry.look, config)
        problems = [f"rank {rank} on {site.host}: {text}" for rank, site in enumerate(sites) for text in site.problems]
        if problems:
            raise RuntimeError("\n         ".join(problems))
        hosts = sorted({site.host for site in sites})
        return f"{counted(len(sites), 'worker')} started on {counted(len(hosts), 'host')}: {', '.join(hosts)}"


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Check as the command line says."""
    refuse(
        (
            arguments.config is None and arguments.dataset is None,
            "nothing to check: give --config NAME|PATH, or --dataset PATH to read a dataset",
        ),
        (arguments.config is None and arguments.set, "--set has no effect without --config"),
    )
    checklist = Checklist()
    if arguments.dataset is not None:
        result.dataset = arguments.dataset
        checklist.run("rows", lambda: check_rows(arguments.dataset))
    if arguments.config is not None:
        config = with_absolute_paths(read_config(arguments))
        result.dataset = result.dataset or config.dataset.path
        check_training(config, checklist)
    checklist.finish()


if __name__ == "__main__":
    cli.main("check")
