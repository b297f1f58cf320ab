"""`groundswell demo`: generate a small archive, prepare, train, evaluate, and show where everything is."""

import argparse
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from conf.load import load
from conf.schema import RunConfig
from conf.sections.section import refuse
from jobs.evaluate import evaluate
from jobs.prepare import prepare
from jobs.shell import cli
from jobs.shell.command import Result, say
from jobs.shell.paths import setting_of
from jobs.train import TrainedRun, train
from models.metrics import constant_counts, f1_micro, frequent_classes
from pipelines.archives.synthetic.files import generate_bigearthnet_v2
from pipelines.dataset.format.manifest import Manifest
from pipelines.storage.locations import absolute_location, is_url
from pipelines.tracking.store.store import show_command
from pipelines.training.ranks.results import Evaluation

_TRAIN, _VALIDATION, _TEST = 256, 64, 96


@dataclass(frozen=True)
class DemoResult:
    """The results for the closing table."""

    trained: TrainedRun
    test: Evaluation
    baseline_f1: float
    seconds: float


def demo(config: RunConfig, generate: Path | None, result: Result) -> DemoResult:
    """Run every job once.

    Args:
        config: Configuration of all jobs.
        generate: Folder in which an archive is generated unless it exists; None: the user names an archive.
        result: Filled in while the jobs run.
    """
    started = time.perf_counter()
    numbers, total = itertools.count(1), 3 if generate is None else 4

    def say_step(text: str) -> None:
        say(f"{next(numbers)}/{total} {text}")

    if generate is not None:
        say_step(f"generate {_TRAIN + _VALIDATION + _TEST} patches in BigEarthNet's layout -> {generate}")
        generate.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(total=_TRAIN + _VALIDATION + _TEST, unit="patch", disable=None, leave=False) as bar:
            generate_bigearthnet_v2(generate, train=_TRAIN, validation=_VALIDATION, test=_TEST, progress=bar.update)
    say_step(f"prepare -> {config.dataset.path}")
    manifest = prepare(config)
    missing = {"train", "validation", "test"} - set(manifest.splits)
    refuse(
        (missing, f"the demo needs train, validation and test; the archive lacks {', '.join(sorted(missing))}"),
        (
            manifest.task != "multi_label",
            f"the demo's table is of archives with several labels an image; {config.dataset.path} is prepared: see "
            "`groundswell train`, which takes those with one label too",
        ),
    )
    say_step(f"train: {config.model.name}, {config.launch.num_workers} workers")
    trained = train(config, result)
    say_step("evaluate")
    test = evaluate(config, trained.summary.model_uri)
    result.metrics = {f"test/{name}": value for name, value in test.metrics.items()}
    return DemoResult(trained, test, baseline_f1(manifest, "test"), time.perf_counter() - started)


def baseline_f1(manifest: Manifest, split: str) -> float:
    """Return the micro F1 on `split` if the training split's best set of frequent classes is always predicted."""
    training, scored = manifest.splits["train"], manifest.splits[split]
    chosen = frequent_classes(np.array(training.class_counts), training.rows)
    return f1_micro(constant_counts(chosen, np.array(scored.class_counts), scored.rows))


def table(config: RunConfig, result: DemoResult) -> list[str]:
    """Return the lines of the closing table."""
    metrics = result.test.metrics
    return [
        "",
        "epoch    loss  val loss  F1 micro  F1 macro     mAP  images/s",
        *(
            f"{number:>5}  {row['train/loss']:.4f}  {row['val/loss']:>8.4f}  {row['val/f1_micro']:>8.4f}  "
            f"{row['val/f1_macro']:>8.4f}  {row['val/mean_average_precision']:.4f}  "
            f"{row['speed/images_per_second']:>8.1f}"
            for number, row in enumerate(result.trained.summary.history, 1)
        ),
        "",
        f"test        F1 micro {metrics['f1_micro']:.4f}, F1 macro {metrics['f1_macro']:.4f}, "
        f"mAP {metrics['mean_average_precision']:.4f}",
        f"baseline    F1 micro {result.baseline_f1:.4f} (the most frequent classes for every patch)",
        f"dataset     {config.dataset.path}",
        f"checkpoint  {os.path.relpath(result.trained.summary.checkpoint)}",
        f"MLflow run  {result.trained.run.run_id}",
        f"time        {result.seconds:.0f} s",
        f"look        {show_command(result.trained.run)}",
    ]


def learnt(result: DemoResult) -> bool:
    """Return whether the last epoch is better than the first one, and the test score better than the baseline's."""
    history = result.trained.summary.history
    return (len(history) == 1 or history[-1]["val/f1_micro"] > history[0]["val/f1_micro"]) and result.test.metrics[
        "f1_micro"
    ] > result.baseline_f1


def demo_folder(archive: str | None) -> Path:
    """Return the folder of the demo: `demo` for the generated archive, `demo-<name>` for the user's own.

    Raises:
        ValueError: The archive's location is misspelt (`locations.absolute_location`).
    """
    if archive is None:
        return Path("demo")
    found = absolute_location(archive)
    name = found.rstrip("/").rpartition("/")[2] if is_url(found) else Path(found).resolve().name
    return Path(f"demo-{name or 'archive'}")


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Run the demo as the command line says."""
    own = arguments.archive
    folder = Path(arguments.folder or demo_folder(own))
    generated = None if own is not None else folder / "BigEarthNet-generated"
    config = load(
        arguments.config,
        [
            setting_of("archive.root", own or str(generated)),
            setting_of("dataset.path", folder / "dataset"),
            setting_of("training.output", folder / "outputs"),
            *arguments.set,
        ],
    )
    shown = demo(config, generated, result)
    say(*table(config, shown))
    if own is None and not arguments.set and not learnt(shown):
        raise RuntimeError("training did not beat its first epoch and the baseline: please report this")


if __name__ == "__main__":
    cli.main("demo")
