"""The verbs of `groundswell` with what they do, read and need, without imports of their packages."""

from dataclasses import dataclass

from jobs.shell.arguments import Parser
from jobs.shell.options import OPTIONS
from pipelines.machine.packages import MODEL, SCORING, SPARK, TRAINING


@dataclass(frozen=True)
class Verb:
    """One command; the `main(arguments, result)` of its module in `jobs` is the job."""

    summary: str
    """Description of the verb, in a line without a full stop."""
    reads: tuple[str, ...] = ()
    """Sections and keys of the configuration that the verb reads; other keys in `--set` are a mistake."""
    ignores: tuple[str, ...] = ()
    """Keys of these sections that the verb does not read."""
    needs: tuple[str, ...] = ()
    """Packages that the verb needs in addition to Groundswell's own dependencies."""


_RECIPE = ("input", "model", "warm_start", "optimizer", "schedule", "exchange", "training")
_TRAINED = ("dataset", "reader", *_RECIPE, "launch", "tracking")
# These verbs run a few synchronous steps, do not validate, and restart if a worker dies.
_OF_A_WHOLE_TRAINING = (
    "training.mode",
    "training.metrics",
    "training.selection",
    "launch.recover",
    "launch.recover_every_steps",
    "launch.allow_fewer_workers",
)
VERBS = {
    "prepare": Verb(
        "write a raw archive as a dataset",
        reads=("archive", "dataset", "prepare", "launch.master"),
        needs=SPARK,
    ),
    "train": Verb("train on a dataset, one worker per Spark task", reads=_TRAINED, needs=TRAINING),
    "evaluate": Verb(
        "measure a logged model on a labelled split",
        reads=(
            "dataset",
            "reader",
            "training.batch_size_per_worker",
            "training.metrics",
            "launch.master",
            "launch.threads_per_worker",
            "evaluate",
            "tracking.experiment",
        ),
        ignores=("reader.name", "reader.threads", "reader.batches_in_flight"),
        needs=SCORING,
    ),
    "probe": Verb(
        "fit a linear head on the frozen features of a logged model, and measure it",
        reads=("dataset", "reader", "training.batch_size_per_worker", "launch", "probe", "tracking.experiment"),
        ignores=(
            "reader.name",
            "reader.threads",
            "reader.batches_in_flight",
            "launch.gpus_per_worker",  # NumPy computes the fit
            "launch.recover",
            "launch.recover_every_steps",
            "launch.allow_fewer_workers",
        ),
        needs=TRAINING,
    ),
    "score": Verb(
        "write the predictions of a logged model for a dataset or a raw archive; continues",
        reads=(
            "archive",
            "score",
            "reader.cache_folder",
            "reader.cache_limit_gib",
            "reader.verify",
            "launch.master",
            "launch.threads_per_worker",
        ),
        ignores=("archive.root",),  # --input names the archive
        needs=SCORING,
    ),
    "check": Verb(
        "check configuration, dataset, storage, tracking and cluster without training",
        reads=_TRAINED,
        needs=SPARK,
    ),
    "config": Verb(
        "print the resolved configuration as YAML",
        reads=("archive", "prepare", *_TRAINED, "score", "evaluate", "probe"),
    ),
    "schedule": Verb(
        "print and plot the learning rate without training",
        reads=(
            "dataset.path",
            "optimizer.name",  # every optimizer has its own default rate
            "optimizer.learning_rate",
            "optimizer.learning_rate_per_256",
            "optimizer.scaling",
            "schedule",
            "input.resolution_schedule",
            "training.epochs",
            "training.batch_size_per_worker",
            "training.accumulation_steps",
            "training.global_batch_size",
            "training.mode",  # it decides how many workers have their own samples
            "launch.num_workers",
        ),
    ),
    "find-rate": Verb(
        "find a learning rate by a range test on the real global batch",
        reads=tuple(section for section in _TRAINED if section != "schedule"),
        ignores=(
            "input.resolution_schedule",  # all steps have full images
            "training.epochs",
            "training.output",
            "training.resume_run",
            "training.checkpoint_every_steps",
            "training.trace_steps",
            "training.tensorflow_profiler",
            "training.ema",
            *_OF_A_WHOLE_TRAINING,
            "tracking.registered_model",
            "tracking.promote_metric",
            "tracking.promote_margin",
            "tracking.offline",
            "tracking.target",
            "tracking.system_seconds",
        ),
        needs=TRAINING,
    ),
    "find-batch": Verb(
        "find the largest batch per worker that fits the memory",
        reads=("dataset", "input", "model", "warm_start.frozen_layers", "optimizer", "exchange", "training", "launch"),
        ignores=(
            "input.resolution_schedule",  # full images need the most memory
            "training.epochs",
            "training.output",
            "training.resume_run",
            "training.checkpoint_every_steps",
            "training.trace_steps",
            "training.tensorflow_profiler",
            "training.batch_size_per_worker",
            *_OF_A_WHOLE_TRAINING,
            # The steps have the rate 0.
            "optimizer.learning_rate",
            "optimizer.learning_rate_per_256",
            "optimizer.scaling",
        ),
        needs=TRAINING,
    ),
    "grid": Verb(
        "train a configuration at every cell of a grid; continues",
        reads=_TRAINED,
        ignores=("training.resume_run",),  # an interrupted cell continues automatically
        needs=TRAINING,
    ),
    "compare": Verb("compare recorded trainings: an HTML report, CSV and LaTeX"),
    "estimate": Verb(
        "predict step time, efficiency, time and cost on more workers from measurements",
    ),
    "sync": Verb("write to MLflow what trainings could not, as it was away"),
    "export": Verb("log the model of a checkpoint to its run, without training", needs=MODEL),
    "list": Verb(
        "list archives, codecs, optimizers, training modes, models, configurations and metrics",
    ),
    "benchmark-reader": Verb("measure how fast a dataset can be read"),
    "demo": Verb(
        "generate a small archive, prepare it, train and evaluate",
        reads=("archive", "prepare", *_TRAINED, "evaluate"),
        # --archive and --folder name all locations; the evaluated model is in MLflow
        ignores=("archive.root", "dataset.path", "tracking.offline"),
        needs=TRAINING,
    ),
}


def parser_of(name: str) -> Parser:
    """Return the parser of a verb's arguments."""
    verb = VERBS[name]
    parser = Parser(name, verb.summary)
    parser.set_defaults(verb=name, reads=verb.reads, ignores=verb.ignores, resolved=None)
    for names, settings in OPTIONS[name]:
        parser.add_argument(*names, **settings)
    return parser
