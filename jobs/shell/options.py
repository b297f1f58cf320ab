"""The options of every verb, without imports of the packages that the verb needs."""

from typing import Any

from conf.load import shipped_names
from conf.sections.codecs import ExchangeConfig
from conf.sections.dataset import ReaderConfig
from conf.sections.training import TrainingConfig
from jobs.shell.arguments import bucket, link, name_or_path, path, png_file, positive, positive_list, positive_number

LISTED = ("archives", "codecs", "optimizers", "modes", "models", "configurations", "metrics")


Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """Return an option of a verb, as names and settings; the arguments are those of argparse's `add_argument`."""
    return names, settings


def _config(default: str | None = None, *, needed: bool = True) -> tuple[Option, ...]:
    """Return `--config` and `--set`; without a default, the user must give `--config` if it is required."""
    shown = "" if default is None else f" (default: {default})"
    return (
        option(
            "--config",
            type=name_or_path,
            default=default,
            required=needed and default is None,
            metavar="NAME|PATH",
            help=f"a YAML file, or one of: {', '.join(shipped_names())}{shown}",
        ),
        option(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="change one value of the configuration; may be repeated",
        ),
    )


CONFIG, OPTIONAL_CONFIG = _config(), _config(needed=False)
MODEL = option(
    "--model",
    required=True,
    metavar="URI",
    help="runs:/<run id>/model, models:/<name>/<version>, models:/<name>@<alias>, an exported model's folder, or "
    "the file of `train --result FILE.json`",
)
OPTIONS: dict[str, tuple[Option, ...]] = {
    "prepare": CONFIG,
    "train": CONFIG,
    "evaluate": (
        *CONFIG,
        MODEL,
        option("--split", default="test", help="split to measure on, or several as one: train,test (default: test)"),
    ),
    "probe": (*CONFIG, MODEL),
    "score": (
        MODEL,
        option("--input", required=True, metavar="PATH|URL", help="a prepared dataset or a raw archive"),
        option("--output", required=True, metavar="PATH|URL", help="folder of the predictions"),
        option(
            "--map",
            type=path,
            metavar="FILE",
            help="draw the likeliest classes on the ground: a .geojson or .tif file, and a picture (.png) beside it",
        ),
        *OPTIONAL_CONFIG,
    ),
    "check": (
        *OPTIONAL_CONFIG,
        option(
            "--dataset", metavar="PATH|URL", help="read every row of this dataset, with its checksum, and nothing else"
        ),
    ),
    "config": (
        *OPTIONAL_CONFIG,
        option("--comments", action="store_true", help="say of each key what it means"),
    ),
    "schedule": (
        *CONFIG,
        option("--images", type=positive, metavar="N", help="training images (default: those of the prepared dataset)"),
        option("--plot", type=png_file, metavar="FILE", help="draw the learning rate into this PNG file"),
    ),
    "find-rate": (
        *CONFIG,
        option(
            "--low",
            type=positive_number,
            metavar="RATE",
            help="first rate (default: a thousandth of the configured peak)",
        ),
        option(
            "--high",
            type=positive_number,
            metavar="RATE",
            help="last rate (default: a hundred times the configured peak)",
        ),
        option("--steps", type=positive, default=100, metavar="N", help="optimizer steps (default: 100)"),
        option("--plot", type=png_file, metavar="FILE", help="draw the losses by rate into this PNG file"),
    ),
    "find-batch": (
        *CONFIG,
        option(
            "--at-most",
            type=positive,
            metavar="N",
            help="try no larger batch (default: a worker's share of the dataset)",
        ),
    ),
    "grid": (
        *CONFIG,
        option(
            "--grid", type=path, required=True, metavar="FILE", help="YAML that says which settings are varied, and how"
        ),
        option(
            "--results",
            type=path,
            required=True,
            metavar="FILE",
            help="JSON lines of the finished cells, which are not trained again; made where it is new",
        ),
        option("--dry-run", action="store_true", help="print the cells and an estimate, and train none"),
    ),
    "compare": (
        option("--experiment", action="append", default=[], metavar="NAME", help="MLflow experiment; may be repeated"),
        option("--filter", metavar="TEXT", help="MLflow's filter, as \"params.`optimizer.name` = 'lars'\""),
        option(
            "--children",
            action="store_true",
            help="also trainings with a parent run, such as the cells of a grid, where the experiment has others too",
        ),
        option(
            "--results",
            type=path,
            action="append",
            default=[],
            metavar="FILE",
            help="results of `groundswell grid`; may be repeated",
        ),
        option(
            "--saved",
            type=path,
            action="append",
            default=[],
            metavar="FILE",
            help="a file that --save wrote; may be repeated",
        ),
        option("--save", type=path, metavar="FILE", help="write the trainings to this file, for --saved elsewhere"),
        option("--metric", metavar="NAME", help="what to compare by (default: val/top_1, val/f1_micro or val/loss)"),
        option(
            "--target",
            type=float,
            metavar="VALUE",
            help="value of the metric to come to (default: nearly the best one)",
        ),
        option(
            "--output",
            type=path,
            default="comparison",
            metavar="FOLDER",
            help="where the report goes (default: comparison)",
        ),
    ),
    "estimate": (
        option("--measurements", type=path, metavar="FILE", help="what `make bench NAME=network` wrote"),
        option(
            "--run",
            action="append",
            default=[],
            metavar="ID",
            help="a finished training whose recorded phases are taken; may be repeated, and given beside "
            "--measurements",
        ),
        option(
            "--link",
            type=link,
            metavar="SPEED[,LATENCY]",
            help="between hosts, as 1Gbit/s or 1Gbit/s,50us (default with --run alone: the link on which it ran)",
        ),
        option("--workers-per-host", type=positive, default=1, metavar="N", help="default: 1"),
        option(
            "--local-link",
            type=link,
            metavar="SPEED[,LATENCY]",
            help="between the workers of one host, as 400Gbit/s,5us",
        ),
        option(
            "--workers",
            type=positive_list,
            default=[2**power for power in range(11)],
            metavar="N,N,...",
            help="numbers of workers (default: 1,2,4,...,1024)",
        ),
        option("--global-batch-size", type=positive, metavar="N", help="predict strong scaling of this batch"),
        option(
            "--batch-size-per-worker",
            type=positive,
            metavar="N",
            help="predict weak scaling of this batch of each worker",
        ),
        option("--codec", action="append", default=[], metavar="NAME", help="may be repeated (default: all)"),
        option(
            "--bucket-mib",
            type=bucket,
            default=str(ExchangeConfig().bucket_mib),
            metavar="MIB",
            help="as exchange.bucket_mib; none: one bucket (default: that of the configuration)",
        ),
        option("--images", type=positive, metavar="N", help="training images, for the time of a training"),
        option("--epochs", type=positive, metavar="N", help="epochs of that training"),
        option("--price", type=positive_number, metavar="P", help="price of one worker for an hour"),
        option(
            "--output",
            type=path,
            default="estimate",
            metavar="FOLDER",
            help="where table and picture go (default: estimate)",
        ),
    ),
    "sync": (
        option(
            "--output",
            default=TrainingConfig.default("output"),
            metavar="PATH|URL",
            help="the training.output of the runs (default: its default)",
        ),
        option("--run", metavar="ID", help="only this run (default: all that lack something in MLflow)"),
    ),
    "export": (
        option("--run", required=True, metavar="ID", help="MLflow's id of the run"),
        option(
            "--output",
            default=TrainingConfig.default("output"),
            metavar="PATH|URL",
            help="the training.output of the run (default: its default)",
        ),
        option(
            "--checkpoint",
            metavar="PATH|URL",
            help="a checkpoint of it (default: that of the best epoch where training.selection asks for it, or the "
            "newest)",
        ),
    ),
    "list": (option("what", nargs="?", choices=LISTED, help="one kind (default: all)"),),
    "benchmark-reader": (
        option("--dataset", required=True, metavar="PATH|URL", help="a prepared dataset"),
        option("--split", default="train", help="split to read (default: train)"),
        option("--batch-size", type=positive, default=256, help="rows of a batch (default: 256)"),
        option(
            "--verify",
            choices=("first_epoch", "always", "never"),
            default=ReaderConfig.default("verify"),
            help="when the checksum of a row is computed, as reader.verify (default: %(default)s)",
        ),
        option(
            "--threads",
            type=positive,
            default=ReaderConfig.default("threads"),
            help="threads that gather batches (default: %(default)s)",
        ),
        option(
            "--cache-folder",
            type=path,
            metavar="FOLDER",
            help="local folder for a dataset that is remote or compressed",
        ),
        option(
            "--cache-limit-gib",
            type=positive_number,
            default=ReaderConfig.default("cache_limit_gib"),
            help="size of that cache (default: %(default)g)",
        ),
        option(
            "--images-per-second",
            type=positive_number,
            default=1000.0,
            help="what one worker trains, for its wait (default: 1000)",
        ),
    ),
    "demo": (
        *_config(default="demo"),
        option("--archive", metavar="PATH|URL", help="your own BigEarthNet v2.0 archive instead of a generated one"),
        option(
            "--folder",
            type=path,
            metavar="FOLDER",
            help="where the dataset and the outputs go (default: demo, or demo-<archive>)",
        ),
    ),
}
"""The options by verb, in the order of the help."""
