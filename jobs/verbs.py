"""Every verb of `groundswell`: what it does and its arguments; known without importing what the verb needs."""

from collections.abc import Callable
from dataclasses import dataclass

from jobs.arguments import Parser, png_file, positive, positive_number


def _prepare(parser: Parser) -> None:
    parser.add_config()


def _train(parser: Parser) -> None:
    parser.add_config()


def _evaluate(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument(
        "--model", required=True, metavar="URI", help="runs:/<run id>/model or models:/<name>/<version>"
    )
    parser.add_argument("--split", default="test", help="split to score (default: test)")


def _benchmark_reader(parser: Parser) -> None:
    parser.add_argument("--dataset", required=True, metavar="PATH|URL", help="a prepared dataset")
    parser.add_argument("--split", default="train", help="split to read (default: train)")
    parser.add_argument("--batch-size", type=positive, default=256, help="rows of a batch (default: 256)")
    parser.add_argument(
        "--verify",
        choices=("first_epoch", "always", "never"),
        default="first_epoch",
        help="when the checksum of a row is computed, as reader.verify (default: first_epoch)",
    )
    parser.add_argument("--threads", type=positive, default=2, help="threads that gather batches (default: 2)")
    parser.add_argument("--cache-folder", help="local folder for a dataset that is remote or compressed")
    parser.add_argument(
        "--cache-limit-gib", type=positive_number, default=100.0, help="size of that cache (default: 100)"
    )
    parser.add_argument(
        "--images-per-second",
        type=positive_number,
        default=1000.0,
        help="what one worker trains, for its wait (default: 1000)",
    )


def _demo(parser: Parser) -> None:
    parser.add_config(default="demo")
    parser.add_argument(
        "--archive", metavar="FOLDER", help="your own BigEarthNet v2.0 archive instead of a generated one"
    )
    parser.add_argument("--folder", help="where the dataset and the outputs go (default: demo, or demo-<archive>)")


LISTED = ("archives", "codecs", "optimizers", "models", "configs", "metrics")


def _config(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument("--comments", action="store_true", help="say of each key what it means")


def _schedule(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument(
        "--images", type=positive, metavar="N", help="training images (default: those of the prepared dataset)"
    )
    parser.add_argument("--plot", type=png_file, metavar="FILE", help="draw the learning rate into this PNG file")


def _find_rate(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument(
        "--low", type=positive_number, metavar="RATE", help="first rate (default: a thousandth of the configured peak)"
    )
    parser.add_argument(
        "--high", type=positive_number, metavar="RATE", help="last rate (default: a hundred times the configured peak)"
    )
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="optimizer steps (default: 100)")
    parser.add_argument("--plot", type=png_file, metavar="FILE", help="draw the losses by rate into this PNG file")


def _find_batch(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument(
        "--at-most", type=positive, metavar="N", help="try no larger batch (default: a worker's share of the dataset)"
    )


def _list(parser: Parser) -> None:
    parser.add_argument("what", nargs="?", choices=LISTED, help="one kind (default: all)")


def _check(parser: Parser) -> None:
    parser.add_config(needed=False)
    parser.add_argument(
        "--dataset", metavar="PATH|URL", help="read every row of this dataset, with its checksum, and nothing else"
    )


@dataclass(frozen=True)
class Verb:
    """One command."""

    summary: str
    """What it does, in a line without a full stop."""
    module: str
    """Module whose `main(arguments, result)` is the job."""
    add_arguments: Callable[[Parser], None]
    reads: tuple[str, ...] = ()
    """Sections and keys of the configuration that it reads; other keys given by `--set` are a mistake."""
    ignores: tuple[str, ...] = ()
    """Keys of these sections that it does not read."""


_RECIPE = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_TRAINED = ("dataset", "reader", *_RECIPE, "launch", "tracking")
VERBS = {
    "prepare": Verb(
        "write a raw archive as a dataset",
        "jobs.prepare",
        _prepare,
        reads=("archive", "dataset", "prepare", "launch.master"),
    ),
    "train": Verb("train on a dataset, one worker per Spark task", "jobs.train", _train, reads=_TRAINED),
    "evaluate": Verb(
        "score a logged model on the test split",
        "jobs.evaluate",
        _evaluate,
        reads=("dataset", "reader", "training.batch_size_per_worker", "training.metrics", "launch"),
        ignores=("reader.name", "launch.allow_fewer_workers"),
    ),
    "check": Verb(
        "check configuration, dataset, storage, tracking and cluster without training",
        "jobs.check",
        _check,
        reads=_TRAINED,
    ),
    "config": Verb(
        "print the resolved configuration as YAML", "jobs.config", _config, reads=("archive", "prepare", *_TRAINED)
    ),
    "schedule": Verb(
        "print and plot the learning rate without training",
        "jobs.schedule",
        _schedule,
        reads=(
            "dataset.path",
            "optimizer",
            "schedule",
            "training.epochs",
            "training.batch_size_per_worker",
            "training.accumulation_steps",
            "training.global_batch_size",
            "launch.num_workers",
        ),
    ),
    "find-rate": Verb(
        "find a learning rate by a range test on the real global batch",
        "jobs.find_rate",
        _find_rate,
        reads=tuple(section for section in _TRAINED if section != "schedule"),
        ignores=(
            "training.epochs",
            "training.output",
            "training.resume_run",
            "training.checkpoint_every_steps",
            "tracking.registered_model",
        ),
    ),
    "find-batch": Verb(
        "find the largest batch per worker that fits the memory",
        "jobs.find_batch",
        _find_batch,
        reads=("dataset", "input", "model", "warm_start.frozen_layers", "optimizer", "exchange", "training", "launch"),
        ignores=(
            "training.epochs",
            "training.output",
            "training.resume_run",
            "training.checkpoint_every_steps",
            "training.batch_size_per_worker",
        ),
    ),
    "list": Verb("list archives, codecs, optimizers, models, configurations and metrics", "jobs.list", _list),
    "benchmark-reader": Verb("measure how fast a dataset can be read", "jobs.benchmark_reader", _benchmark_reader),
    "demo": Verb(
        "generate a small archive, prepare it, train and evaluate",
        "jobs.demo",
        _demo,
        reads=("archive", "prepare", *_TRAINED),
        ignores=("archive.root", "dataset.path", "training.resume_run"),  # --archive and --folder say where all is
    ),
}


def parser_of(name: str) -> Parser:
    """The parser of a verb's arguments."""
    verb = VERBS[name]
    parser = Parser(name, verb.summary)
    parser.set_defaults(verb=name, reads=verb.reads, ignores=verb.ignores)
    verb.add_arguments(parser)
    return parser
