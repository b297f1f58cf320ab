"""The settings of every training mode, by name; their defaults are stated here only."""

from typing import Annotated, Any, Literal

from pydantic import Field

from conf.section import Member, Section, member_names


class SynchronousConfig(Member):
    """Every step averages the gradients of all workers."""

    name: Literal["synchronous"] = "synchronous"
    shard_optimizer: bool = False
    """Whether each of N workers keeps an N-th of the optimizer's moments and updates that part of the weights (ZeRO-1).
    The result is the same, and each worker needs less memory."""

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the constructor of that name: the optimizer itself is made in parts."""
        return self.model_dump(exclude={"name", "shard_optimizer"})


class OuterConfig(Section):
    """The update of the common weights by the mean of the ways that the workers went; 1 and 0 average their weights."""

    rate: float = Field(default=1.0, gt=0)
    """Learning rate of the common weights: the block learning rate of BMUF, 0.7 in DiLoCo."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of the common weights: the block momentum of BMUF, 0.9 in DiLoCo."""
    nesterov: bool = True
    """Whether to look one momentum step ahead."""


class LocalConfig(Member):
    """Workers train alone and average their weights every few steps: local SGD, post-local SGD, BMUF, DiLoCo."""

    name: Literal["local"] = "local"
    every_steps: int = Field(default=8, gt=0)
    """Optimizer steps from one exchange to the next; the last step of an epoch exchanges too."""
    local_after_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps that average gradients in float32, as synchronous training does."""
    outer: OuterConfig = OuterConfig()

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the constructor of that name."""
        return {**self.model_dump(exclude={"name", "outer"}), **self.outer.model_dump()}


class DelayedConfig(Member):
    """Every step applies the mean gradient of the step before it, which travels while the step computes."""

    name: Literal["delayed"] = "delayed"


class PipelineConfig(Member):
    """Some consecutive workers hold one copy of the network, each a stage, and pass micro-batches on (GPipe)."""

    name: Literal["pipeline"] = "pipeline"
    stages: int = Field(default=2, ge=2, le=4)
    """Workers of one pipeline, which divide launch.num_workers; training.accumulation_steps are its micro-batches."""


class ParameterServerConfig(Member):
    """Workers fetch weights from shards at all ranks and push gradients: Downpour, SSP, backup workers."""

    name: Literal["parameter_server"] = "parameter_server"
    synchrony: Literal["async", "ssp", "backup"] = "async"
    """`async`: no worker waits; `ssp`: for those that are `bound` steps behind; `backup`: for all but `backup_workers`
    in every step."""
    bound: int = Field(default=3, ge=0)
    """Steps by which a worker may be ahead of the slowest one, with `ssp`."""
    backup_workers: int = Field(default=1, ge=0)
    """Workers whose gradients no step waits for, with `backup`; 0 is synchronous training."""
    fetch_every: int = Field(default=1, gt=0)
    """Steps of a worker from one fetch of the weights to the next, with `async`."""
    push_every: int = Field(default=1, gt=0)
    """Steps of a worker whose gradients are pushed as one sum, with `async`."""
    staleness_aware: bool = False
    """Whether a gradient that comes later than usual is applied at a lower rate, with `async` and `ssp`."""
    synchronous_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps in lock step, with `async` and `ssp`."""

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the constructor of that name; what this synchrony does not have is neutral."""
        backup = self.synchrony == "backup"
        free = self.synchrony == "async"
        return {
            **self.model_dump(exclude={"name"}),
            "fetch_every": self.fetch_every if free else 1,
            "push_every": self.push_every if free else 1,
            "backup_workers": self.backup_workers if backup else 0,
            "synchronous_steps": 0 if backup else self.synchronous_steps,
        }


ModeConfig = Annotated[
    SynchronousConfig | LocalConfig | DelayedConfig | PipelineConfig | ParameterServerConfig,
    Field(discriminator="name"),
]

MODE_NAMES = member_names(ModeConfig)


def shards_optimizer(mode: ModeConfig) -> bool:
    """Whether each worker keeps only a part of the optimizer's moments."""
    return isinstance(mode, SynchronousConfig) and mode.shard_optimizer
