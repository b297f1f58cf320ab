"""The settings of the Spark job that runs the workers."""

from pydantic import Field

from conf.section import Section


class LaunchConfig(Section):
    """Where the workers run."""

    master: str = Field(default="local[*]", min_length=1)
    """Spark master, used where neither spark-submit nor a notebook has chosen one."""
    num_workers: int = Field(default=1, gt=0)
    """Number of workers: one rank, in one process, per Spark task."""
    gpus_per_worker: int = Field(default=0, ge=0, le=1)
    """A worker trains on one GPU, or on the CPU."""
    threads_per_worker: int | None = Field(default=None, gt=0)
    """TensorFlow's threads; null: the cores of the worker's Spark task (`spark.task.cpus`)."""
    start_timeout_seconds: int = Field(default=300, gt=0)
    """How long ranks wait for each other: to start, and for Gloo in one operation."""
    retries: int = Field(default=0, ge=0)
    """Further attempts, each from the newest checkpoint, after a process, executor or host died, or a hang."""
    hang_timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """An attempt ends when a rank makes no progress for so long; this must cover the first step, which compiles."""
    stop_grace_seconds: float = Field(default=60, ge=0, allow_inf_nan=False)
    """How long workers that were asked to stop may take to write their checkpoint; then they are killed."""
    allow_fewer_workers: bool = False
    """Whether a further attempt may have fewer workers where slots are lost: each then accumulates more micro-batches,
    and the global batch stays as it is."""
    accept_unencrypted: bool = False
    """Whether to run although Spark was told to encrypt or authenticate: neither control channel nor gradients are."""
