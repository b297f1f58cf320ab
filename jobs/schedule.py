"""`groundswell schedule`: shows the learning rate of a configuration as a table and a picture, without training."""

import argparse
from pathlib import Path

from conf.schema import RunConfig
from jobs.shell import cli
from jobs.shell.command import Result, read_config, say
from jobs.shell.paths import PLOT_MARK, check_outputs, save_plot, with_absolute_paths
from pipelines.dataset.format.manifest import read_manifest
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.locations import redacted
from pipelines.training.record.plots import schedule_curve
from pipelines.training.setup.rates import boundary_steps, make_schedule, peak_learning_rate
from pipelines.training.setup.resolution import scaled_epochs

_PARTS = 10
"""Number of equal parts of the run; the table has a line at the beginning of each part."""
_CURVE_POINTS = 2000


def training_images(config: RunConfig) -> int:
    """Count the training images of the configured dataset.

    Raises:
        ValueError: There is no finished dataset, or it has no training split.
    """
    path = redacted(config.dataset.path)
    try:
        manifest = read_manifest(with_absolute_paths(config).dataset.path)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not a finished dataset whose training images could be counted: give --images N"
        ) from None
    if TRAINING_SPLIT not in manifest.splits:
        raise ValueError(f"{path} has no training split: give --images N")
    return manifest.splits[TRAINING_SPLIT].rows


def schedule_table(config: RunConfig, images: int) -> list[str]:
    """Describe the learning rate of a run.

    Args:
        config: The configuration.
        images: Number of training images.

    Returns:
        Lines: the peak and the number of steps, then the rates. Their steps are the first, the last, and every tenth
            of the run. Those around every place of the schedule and each change of the image size come to them.

    Raises:
        ValueError: The images are fewer than one global batch, or the schedule does not fit the run.
    """
    steps, epochs = _steps(config, images), config.training.epochs
    total, peak = steps * epochs, peak_learning_rate(config.optimizer, config.global_batch_size)
    rate = make_schedule(config, steps)
    points: dict[int, list[str]] = {part * total // _PARTS: [] for part in range(_PARTS)}
    points[0].append("first step")
    for name, step in boundary_steps(config.schedule, epochs, steps):
        if step > 0:
            points.setdefault(step - 1, [])
        if step < total:
            points.setdefault(step, []).append(name)  # milestones of a very short run may share a step
    for part in scaled_epochs(config.input, config.schedule.recipe_epochs, epochs, steps):
        text = "full images" if part.scale == 1 else f"images scaled by {part.scale:g}"
        points.setdefault(part.first * steps, []).append(text)
    points.setdefault(total - 1, []).append("last step")
    return [
        f"peak {peak:g}, global batch {config.global_batch_size:,}, {images:,} images, "
        f"{steps:,} steps an epoch, {epochs} epochs, {total:,} steps",
        f"{'step':>12} {'epoch':>9} {'rate':>13}",
        *(
            f"{step:>12,} {step / steps:>9.2f} {rate(step):>13.6g}  {', '.join(names)}".rstrip()
            for step, names in sorted(points.items())
        ),
    ]


def write_plot(config: RunConfig, images: int, path: Path, title: str) -> None:
    """Draw the learning rate by epoch into a PNG file.

    Raises:
        OSError: The file cannot be written.
        ValueError: As `schedule_table`.
    """
    steps = _steps(config, images)
    total = steps * config.training.epochs
    rate = make_schedule(config, steps)
    places = [step for _, step in boundary_steps(config.schedule, config.training.epochs, steps)]
    shown = {round(part * (total - 1) / _CURVE_POINTS) for part in range(_CURVE_POINTS + 1)}
    shown |= {step + offset for step in places for offset in (-1, 0) if 0 <= step + offset < total}
    save_plot(schedule_curve({title: [(step / steps, rate(step)) for step in sorted(shown)]}), path)


def _steps(config: RunConfig, images: int) -> int:
    steps = steps_per_epoch(images, config.global_batch_size)
    if steps == 0:
        raise ValueError(f"{images:,} images are fewer than one global batch of {config.global_batch_size:,}")
    return steps


def main(arguments: argparse.Namespace, result: Result) -> None:
    """Print the table, and write the plot if it is requested."""
    if arguments.plot is not None:
        check_outputs(f"--plot {arguments.plot}", {arguments.plot: PLOT_MARK})
    config = read_config(arguments)
    images = training_images(config) if arguments.images is None else arguments.images
    say(*schedule_table(config, images))
    if arguments.plot is not None:
        write_plot(config, images, arguments.plot, Path(arguments.config).stem)
        say(f"plot {arguments.plot}")


if __name__ == "__main__":
    cli.main("schedule")
