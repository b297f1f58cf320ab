"""The arguments of every verb, without imports of the packages that the verb needs."""

from conf.sections.dataset import ReaderConfig
from conf.sections.exchange import ExchangeConfig
from jobs.shell.arguments import Parser, bucket, link, path, png_file, positive, positive_list, positive_number


def prepare(parser: Parser) -> None:
    """Add the arguments of `prepare`."""
    parser.add_config()


def train(parser: Parser) -> None:
    """Add the arguments of `train`."""
    parser.add_config()


def evaluate(parser: Parser) -> None:
    """Add the arguments of `evaluate`."""
    parser.add_config()
    _add_model(parser)
    parser.add_argument(
        "--split", default="test", help="split to measure on, or several as one: train,test (default: test)"
    )


def probe(parser: Parser) -> None:
    """Add the arguments of `probe`."""
    parser.add_config()
    _add_model(parser)


def score(parser: Parser) -> None:
    """Add the arguments of `score`."""
    _add_model(parser)
    parser.add_argument("--input", required=True, metavar="PATH|URL", help="a prepared dataset or a raw archive")
    parser.add_argument("--output", required=True, metavar="PATH|URL", help="folder of the predictions")
    parser.add_argument(
        "--map",
        type=path,
        metavar="FILE",
        help="draw the likeliest classes on the ground: a .geojson or .tif file, and a picture (.png) beside it",
    )
    parser.add_config(needed=False)


def benchmark_reader(parser: Parser) -> None:
    """Add the arguments of `benchmark-reader`."""
    reader = {key: ReaderConfig.default(key) for key in ("verify", "threads", "cache_limit_gib")}
    parser.add_argument("--dataset", required=True, metavar="PATH|URL", help="a prepared dataset")
    parser.add_argument("--split", default="train", help="split to read (default: train)")
    parser.add_argument("--batch-size", type=positive, default=256, help="rows of a batch (default: 256)")
    parser.add_argument(
        "--verify",
        choices=("first_epoch", "always", "never"),
        default=reader["verify"],
        help="when the checksum of a row is computed, as reader.verify (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=positive, default=reader["threads"], help="threads that gather batches (default: %(default)s)"
    )
    parser.add_argument(
        "--cache-folder", type=path, metavar="FOLDER", help="local folder for a dataset that is remote or compressed"
    )
    parser.add_argument(
        "--cache-limit-gib",
        type=positive_number,
        default=reader["cache_limit_gib"],
        help="size of that cache (default: %(default)g)",
    )
    parser.add_argument(
        "--images-per-second",
        type=positive_number,
        default=1000.0,
        help="what one worker trains, for its wait (default: 1000)",
    )


def demo(parser: Parser) -> None:
    """Add the arguments of `demo`."""
    parser.add_config(default="demo")
    parser.add_argument(
        "--archive", metavar="PATH|URL", help="your own BigEarthNet v2.0 archive instead of a generated one"
    )
    parser.add_argument(
        "--folder",
        type=path,
        metavar="FOLDER",
        help="where the dataset and the outputs go (default: demo, or demo-<archive>)",
    )


LISTED = ("archives", "codecs", "optimizers", "modes", "models", "configs", "metrics")


def config(parser: Parser) -> None:
    """Add the arguments of `config`."""
    parser.add_config(needed=False)
    parser.add_argument("--comments", action="store_true", help="say of each key what it means")


def schedule(parser: Parser) -> None:
    """Add the arguments of `schedule`."""
    parser.add_config()
    parser.add_argument(
        "--images", type=positive, metavar="N", help="training images (default: those of the prepared dataset)"
    )
    parser.add_argument("--plot", type=png_file, metavar="FILE", help="draw the learning rate into this PNG file")


def find_rate(parser: Parser) -> None:
    """Add the arguments of `find-rate`."""
    parser.add_config()
    parser.add_argument(
        "--low", type=positive_number, metavar="RATE", help="first rate (default: a thousandth of the configured peak)"
    )
    parser.add_argument(
        "--high", type=positive_number, metavar="RATE", help="last rate (default: a hundred times the configured peak)"
    )
    parser.add_argument("--steps", type=positive, default=100, metavar="N", help="optimizer steps (default: 100)")
    parser.add_argument("--plot", type=png_file, metavar="FILE", help="draw the losses by rate into this PNG file")


def find_batch(parser: Parser) -> None:
    """Add the arguments of `find-batch`."""
    parser.add_config()
    parser.add_argument(
        "--at-most", type=positive, metavar="N", help="try no larger batch (default: a worker's share of the dataset)"
    )


def compare(parser: Parser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument(
        "--experiment", action="append", default=[], metavar="NAME", help="MLflow experiment; may be repeated"
    )
    parser.add_argument("--filter", metavar="TEXT", help="MLflow's filter, as \"params.`optimizer.name` = 'lars'\"")
    parser.add_argument(
        "--children", action="store_true", help="also trainings that have a parent run, such as the cells of a grid"
    )
    parser.add_argument(
        "--results",
        type=path,
        action="append",
        default=[],
        metavar="FILE",
        help="results of `groundswell grid`; may be repeated",
    )
    parser.add_argument(
        "--saved",
        type=path,
        action="append",
        default=[],
        metavar="FILE",
        help="a file that --save wrote; may be repeated",
    )
    parser.add_argument(
        "--save", type=path, metavar="FILE", help="write the trainings to this file, for --saved elsewhere"
    )
    parser.add_argument(
        "--metric", metavar="NAME", help="what to compare by (default: val/top_1, val/f1_micro or val/loss)"
    )
    parser.add_argument(
        "--target", type=float, metavar="VALUE", help="value of the metric to come to (default: nearly the best one)"
    )
    parser.add_argument(
        "--output",
        type=path,
        default="comparison",
        metavar="FOLDER",
        help="where the report goes (default: comparison)",
    )


def estimate(parser: Parser) -> None:
    """Add the arguments of `estimate`."""
    parser.add_argument("--measurements", type=path, metavar="FILE", help="what `make bench NAME=network` wrote")
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="ID",
        help="a finished training whose recorded phases are taken; may be repeated, and given beside --measurements",
    )
    parser.add_argument(
        "--link",
        type=link,
        metavar="SPEED[,LATENCY]",
        help="between hosts, as 1Gbit/s or 1Gbit/s,50us (default with --run alone: the link on which it ran)",
    )
    parser.add_argument("--workers-per-host", type=positive, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--local-link", type=link, metavar="SPEED[,LATENCY]", help="between the workers of one host, as 400Gbit/s,5us"
    )
    parser.add_argument(
        "--workers",
        type=positive_list,
        default=[2**power for power in range(11)],
        metavar="N,N,...",
        help="numbers of workers (default: 1,2,4,...,1024)",
    )
    parser.add_argument("--global-batch-size", type=positive, metavar="N", help="predict strong scaling of this batch")
    parser.add_argument(
        "--batch-size-per-worker", type=positive, metavar="N", help="predict weak scaling of this batch of each worker"
    )
    parser.add_argument("--codec", action="append", default=[], metavar="NAME", help="may be repeated (default: all)")
    parser.add_argument(
        "--bucket-mib",
        type=bucket,
        default=str(ExchangeConfig().bucket_mib),
        metavar="MIB",
        help="as exchange.bucket_mib; none: one bucket (default: that of the configuration)",
    )
    parser.add_argument("--images", type=positive, metavar="N", help="training images, for the time of a training")
    parser.add_argument("--epochs", type=positive, metavar="N", help="epochs of that training")
    parser.add_argument("--price", type=positive_number, metavar="P", help="price of one worker for an hour")
    parser.add_argument(
        "--output",
        type=path,
        default="estimate",
        metavar="FOLDER",
        help="where table and picture go (default: estimate)",
    )


def grid(parser: Parser) -> None:
    """Add the arguments of `grid`."""
    parser.add_config()
    parser.add_argument(
        "--grid", type=path, required=True, metavar="FILE", help="YAML that says which settings are varied, and how"
    )
    parser.add_argument(
        "--results",
        type=path,
        required=True,
        metavar="FILE",
        help="JSON lines of the finished cells, which are not trained again; made where it is new",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the cells and an estimate, and train none")


def list_kinds(parser: Parser) -> None:
    """Add the arguments of `list`."""
    parser.add_argument("what", nargs="?", choices=LISTED, help="one kind (default: all)")


def sync(parser: Parser) -> None:
    """Add the arguments of `sync`."""
    parser.add_argument("--output", metavar="PATH|URL", help="the training.output of the runs (default: its default)")
    parser.add_argument("--run", metavar="ID", help="only this run (default: all that lack something in MLflow)")


def export(parser: Parser) -> None:
    """Add the arguments of `export`."""
    parser.add_argument("--run", required=True, metavar="ID", help="MLflow's id of the run")
    parser.add_argument("--output", metavar="PATH|URL", help="the training.output of the run (default: its default)")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH|URL",
        help="a checkpoint of it (default: that of the best epoch where training.selection asks for it, or the newest)",
    )


def check(parser: Parser) -> None:
    """Add the arguments of `check`."""
    parser.add_config(needed=False)
    parser.add_argument(
        "--dataset", metavar="PATH|URL", help="read every row of this dataset, with its checksum, and nothing else"
    )


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="URI",
        help="runs:/<run id>/model, models:/<name>/<version>, models:/<name>@<alias>, an exported model's folder, or "
        "the file of `train --result FILE.json`",
    )
