"""The settings of the Spark job that runs the workers."""

from typing import Literal

from pydantic import Field

from conf.sections.section import Section


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
    """How long ranks wait for each other to start, or to join again after one of them died."""
    exchange_timeout_seconds: int = Field(default=60, gt=0)
    """How long Gloo waits for another rank's next bytes within one operation, before it counts as lost."""
    recover: Literal["restart", "in_place"] = "restart"
    """What follows when a worker's process dies. `restart`: the attempt ends, and `retries` says whether there is
    another one, from the newest checkpoint. `in_place`: a spare process, which each worker holds ready, takes the dead
    one's place; the others keep their processes, and training continues at the same step. Takes twice the memory of a
    worker's variables, and that of the spare, which computes one step ahead where the memory holds two. A lost executor
    or host, a hang and an exception are never in place."""
    recover_every_steps: int = Field(default=1, gt=0)
    """With `recover=in_place`, optimizer steps from one state that is kept in memory to the next; a larger number saves
    the copy and repeats up to so many steps."""
    retries: int = Field(default=0, ge=0)
    """Further attempts, each from the newest checkpoint, after a process, executor or host died, or a hang."""
    hang_timeout_seconds: float | None = Field(default=None, gt=0)
    """An attempt ends when a rank makes no progress for so long; this must cover the first step, which compiles, and
    the writing of a checkpoint, but not the model at the end."""
    stop_grace_seconds: float = Field(default=60, ge=0)
    """How long workers that were asked to stop may take to write their checkpoint; then they are killed."""
    allow_fewer_workers: bool = False
    """Whether a further attempt may have fewer workers where slots are lost: each then accumulates more micro-batches,
    and the global batch stays as it is."""
    accept_unencrypted: bool = False
    """Whether to run although Spark was told to encrypt or authenticate: neither control channel nor gradients are."""
