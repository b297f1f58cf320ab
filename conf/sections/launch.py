"""The settings of the Spark job that runs the workers, and those of MLflow's records."""

import re
from typing import Literal

from pydantic import Field, field_validator

from conf.sections.section import Section

# Characters that MLflow refuses in a name, or that end a text in its filters.
_NOT_IN_A_NAME = re.compile(r"""[/:'"`]""")


class LaunchConfig(Section):
    """The location and the resources of the workers."""

    master: str = Field(default="local[*]", min_length=1)
    """Spark master, used if neither spark-submit nor a notebook has chosen one."""
    num_workers: int = Field(default=1, gt=0)
    """Number of workers: one rank, in one process, per Spark task."""
    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    """Number of GPUs per worker: one, or none to train on the CPU."""
    threads_per_worker: int | None = Field(default=None, gt=0)
    """Number of TensorFlow's threads; null: the cores of the worker's Spark task (`spark.task.cpus`)."""
    start_timeout_seconds: int = Field(default=300, gt=0)
    """How long ranks wait for each other to start, or to rejoin after a rank died."""
    exchange_timeout_seconds: int = Field(default=60, gt=0)
    """How long Gloo waits for the next bytes of another rank within one operation; then it treats the rank as lost."""
    recover: Literal["restart", "in_place"] = "restart"
    """Recovery after the death of a worker's process. `restart`: the attempt ends, and a further one, if `retries`
    allows it, starts from the newest checkpoint. `in_place`: a spare process, which each worker keeps ready, replaces
    the dead one. The other processes stay, and training continues at the same step. This mode takes twice the memory of
    a worker's variables, plus the memory of the spare process. The spare computes one step in advance if the memory is
    large enough for two. A rank that hangs after the death of another one is replaced too, after half of
    `start_timeout_seconds`. There is no recovery in place from a lost executor or host, another hang or an
    exception."""
    recover_every_steps: int = Field(default=1, gt=0)
    """With `recover=in_place`, optimizer steps between two in-memory checkpoints. A larger number makes fewer copies,
    and a recovery repeats up to this many steps."""
    retries: int = Field(default=0, ge=0)
    """Number of further attempts, each from the newest checkpoint, after a dead process, executor or host, or a
    hang."""
    hang_timeout_seconds: float | None = Field(default=None, gt=0)
    """Longest time without progress of a rank, after which the attempt ends. It must cover the first step, which
    compiles, and the writing of a checkpoint, but not of the final model."""
    stop_grace_seconds: float = Field(default=60, ge=0)
    """How long workers may take to write their checkpoint after a request to stop; then they are killed."""
    allow_fewer_workers: bool = False
    """Whether a further attempt may have fewer workers if slots are lost. Each worker then accumulates more
    micro-batches, and the global batch does not change."""
    accept_unencrypted: bool = False
    """Whether to run although Spark's settings ask for encryption or authentication. The control channel and the
    gradients have neither."""


class TrackingConfig(Section):
    """The settings of MLflow; the store is MLFLOW_TRACKING_URI, or MLflow's default."""

    experiment: str | None = Field(default=None, min_length=1)
    """Experiment of the run, created if it does not exist. Null: the active one (mlflow.set_experiment,
    MLFLOW_EXPERIMENT_NAME or a notebook on Databricks), else groundswell."""
    run_name: str | None = None
    """Name of the run; null: what differs most and a digest of the settings, as r50-lars-g512-4w-90e-s0-5f3a9c."""
    registered_model: str | None = Field(default=None, min_length=1)
    """Name under which the logged model is registered, `catalog.schema.model` in Unity Catalog; null: no
    registration."""
    promote_metric: str = Field(default="val/f1_macro", min_length=1)
    """Validation metric that compares versions; a metric whose name ends in loss is better when lower."""
    promote_margin: float = Field(default=0.0, ge=0)
    """Smallest improvement on the version with the alias champion with which a new version takes this alias; else it
    becomes the challenger. A version that was validated on another dataset than the champion also becomes the
    challenger. A repair may have made the dataset another one: move the alias in MLflow then."""
    offline: bool = False
    """Whether to train without MLflow: the records stay with the checkpoints until `groundswell sync` writes them to
    MLflow. From then on the run has MLflow's identifier. Without this setting MLflow must answer at the start (exit
    code 4). An outage after the start does not stop the training."""
    target: float | None = None
    """Target for the metric training.selection.metric (null there: val/f1_micro or val/top_1): the run's summary has
    the samples and seconds to reach it. Null: no target."""
    system_seconds: float | None = Field(default=10.0, gt=0)
    """Time between samples of each rank's processor, memory, disk, network and GPU; null: no samples."""

    @field_validator("registered_model")
    @classmethod
    def _can_be_registered(cls, name: str | None) -> str | None:
        if name is not None and (found := _NOT_IN_A_NAME.search(name)):
            raise ValueError(
                f"tracking.registered_model={name}: a name in MLflow's registry has no {found[0]}, "
                "expected one such as resnet50 or catalog.schema.model"
            )
        return name
