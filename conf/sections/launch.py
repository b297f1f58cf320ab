"""The settings of the Spark job that runs the workers."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


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
    large enough for two. There is no recovery in place from a lost executor or host, a hang or an exception."""
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
