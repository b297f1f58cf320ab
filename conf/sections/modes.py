"""The settings of every training mode, by name, and its declaration; their defaults are stated here only."""

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from conf.sections.mode_declaration import AllBut, Beginning, Idle, ModeDeclaration, Refusal, multiples_of
from conf.sections.section import Imported, NamedSection, Section

ALONE = "launch.num_workers=1 has no other ranks"
NO_HALF_FLOATS = "set training.precision=bfloat16 or float32"
NO_CLIPPING = "set training.gradient_clipping=null"
NO_AVERAGE = "set training.ema=null"
NO_TRACE = "set training.trace_steps=null"
OWN_BATCH_NORM = "set model.batch_norm_ranks=1"
PUSHED_CODECS = ("none", "onebit", "topk")
"""Codecs whose first message contains all that a worker sends, for the training mode `parameter_server`."""
_APART = "with training.mode=parameter_server workers step at different times"
_UPDATES_PER_AVERAGE = 10
_TENSORFLOW = "tensorflow"


class ModeSettings(NamedSection, ModeDeclaration):
    """The settings of a mode of this project, which are also its declaration."""

    @property
    def layout(self) -> str:
        """See `ModeDeclaration`."""
        return self.name

    @property
    def declaration(self) -> ModeDeclaration:
        """The declaration of the mode for the rest of the product."""
        return self


class SynchronousConfig(ModeSettings):
    """Every step averages the gradients of all workers."""

    is_lock_step: ClassVar[bool] = True
    name: Literal["synchronous"] = "synchronous"
    shard_optimizer: bool = False
    """Whether each of N workers keeps an N-th of the optimizer's moments and updates that part of the weights (ZeRO-1).
    The result is the same, and each worker needs less memory."""

    def refusals(self) -> Sequence[Refusal]:
        """See `ModeDeclaration`."""
        if not self.shard_optimizer:
            return ()
        reason = (
            "gives every worker all of the mean gradient, and training.mode.shard_optimizer=true gives each one its "
            "part, in float32"
        )
        return (Refusal("exchange.codec", ("none",), reason, "set exchange.codec=none or training.mode=synchronous"),)

    def idle(self) -> Sequence[Idle]:
        """See `ModeDeclaration`."""
        key, of_plain_sgd = "training.mode.shard_optimizer", {"optimizer": ("sgd",), "optimizer.momentum": (0.0,)}
        return (
            Idle(key, "optimizer.momentum=0 keeps no moments to divide", of_plain_sgd),
            Idle(key, ALONE, {"launch.num_workers": (1,)}, per_run=True),
        )


class OuterConfig(Section):
    """The update of the common weights by the mean of the workers' changes; 1 and 0 average the workers' weights."""

    rate: float = Field(default=1.0, gt=0)
    """Learning rate of the common weights: the block learning rate of BMUF, 0.7 in DiLoCo."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of the common weights: the block momentum of BMUF, 0.9 in DiLoCo."""
    nesterov: bool = True
    """Whether to use Nesterov momentum, which looks one momentum step ahead."""


class LocalConfig(ModeSettings):
    """Workers train alone and average their weights every few steps: local SGD, post-local SGD, BMUF, DiLoCo."""

    name: Literal["local"] = "local"
    every_steps: int = Field(default=8, gt=0)
    """Number of optimizer steps between two exchanges; the last step of an epoch exchanges too."""
    local_after_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps that average gradients in float32, as synchronous training does."""
    outer: OuterConfig = OuterConfig()

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor of that name."""
        return {**self.model_dump(exclude={"name", "outer"}), **self.outer.model_dump()}

    @property
    def layout(self) -> str:
        """See `ModeDeclaration`: without momentum there is no variable for it."""
        return "local with outer momentum" if self.outer.momentum else "local"

    def refusals(self) -> Sequence[Refusal]:
        """See `ModeDeclaration`."""
        return (
            Refusal(
                "exchange.codec",
                AllBut(("dgc", "onebit_adam")),
                "keeps the momentum of the gradients of every step, and training.mode=local exchanges no gradients",
                "choose another exchange.codec, or training.mode=synchronous",
            ),
            Refusal(
                "training.precision",
                AllBut(("float16",)),
                "has a loss scale on which all workers agree in every step, and training.mode=local exchanges nothing "
                "in most steps",
                NO_HALF_FLOATS,
            ),
            Refusal(
                "training.ema",
                (),
                "averages the weights after every step, and with training.mode=local they differ between workers",
                NO_AVERAGE,
            ),
            Refusal(
                "model.batch_norm_ranks",
                (1,),
                "exchanges statistics in every step, and training.mode=local exchanges nothing in most steps",
                OWN_BATCH_NORM,
            ),
            Refusal(
                "training.checkpoint_every_steps",
                multiples_of(self.every_steps),
                f"is no multiple of training.mode.every_steps={self.every_steps}, and between two exchanges every "
                f"worker has other weights",
                "set a multiple",
            ),
        )

    def idle(self) -> Sequence[Idle]:
        """See `ModeDeclaration`."""
        return (
            Idle(
                "exchange.rescale_residual",
                "training.mode=local exchanges weights, whose residual does not depend on the learning rate",
            ),
            Idle(
                "training.mode.outer.nesterov",
                "training.mode.outer.momentum=0 has nothing to look ahead with",
                {"training.mode.outer.momentum": (0,)},
            ),
        )

    def beginning(self) -> Beginning:
        """See `ModeDeclaration`."""
        return Beginning("training.mode.local_after_steps", self.local_after_steps, "workers never train alone")

    def exchanges(self, epochs: int, steps_per_epoch: int) -> int:
        """See `ModeDeclaration`."""
        each = math.ceil(steps_per_epoch / self.every_steps)
        return math.ceil((epochs * steps_per_epoch - self.local_after_steps) / steps_per_epoch * each)

    def wanted_exchanges(self) -> tuple[str, int] | None:
        """See `ModeDeclaration`."""
        momentum = self.outer.momentum
        if not momentum:
            return None
        # Momentum m averages about the last 1 / (1 - m) updates; a run with only a few times as many makes little
        # progress.
        return f"training.mode.outer.momentum={momentum:g}", round(_UPDATES_PER_AVERAGE / (1 - momentum))


class DelayedConfig(ModeSettings):
    """Every step applies the mean gradient of the previous step, which is exchanged while the step computes."""

    name: Literal["delayed"] = "delayed"

    def refusals(self) -> Sequence[Refusal]:
        """See `ModeDeclaration`."""
        return (
            Refusal(
                "exchange.codec",
                AllBut(("dgc", "onebit_adam")),
                "has a momentum of its own for the weights that gave the gradient, and training.mode=delayed applies "
                "it one step later",
                "choose another exchange.codec, or training.mode=synchronous",
            ),
            Refusal(
                "training.precision",
                AllBut(("float16",)),
                "skips the step whose gradients overflow, and with training.mode=delayed these have travelled before "
                "the step is taken",
                NO_HALF_FLOATS,
            ),
        )


class PipelineConfig(ModeSettings):
    """Some consecutive workers hold one copy of the network, one stage each, and pass micro-batches on (GPipe)."""

    not_in_place: ClassVar[str] = (
        "replaces one worker by a spare that computes as any other, and with training.mode=pipeline the others hold "
        "other stages"
    )
    is_tried_by_find_batch: ClassVar[bool] = False
    keeps_by_path: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {
        "time/idle_share": "part of the ticks so far in which rank 0 had no micro-batch to compute"
    }
    name: Literal["pipeline"] = "pipeline"
    stages: int = Field(default=2, ge=2, le=4)
    """Number of workers of one pipeline; it divides launch.num_workers. training.accumulation_steps are its
    micro-batches."""

    @property
    def layout(self) -> str:
        """See `ModeDeclaration`: a checkpoint has the whole network."""
        return SynchronousConfig().layout

    @property
    def ranks_per_copy(self) -> int:
        """See `ModeDeclaration`."""
        return self.stages

    def refusals(self) -> Sequence[Refusal]:
        """See `ModeDeclaration`."""
        return (
            Refusal(
                "exchange.codec",
                ("none",),
                "keeps what is left to send by worker, and with training.mode=pipeline workers hold different stages",
                "set exchange.codec=none",
            ),
            Refusal(
                "reader.name",
                ("groundswell",),
                "gives samples in an order that depends on its threads, and with training.mode=pipeline one worker "
                "reads the images and another one their labels",
                "set reader.name=groundswell",
            ),
            Refusal(
                "training.precision",
                AllBut(("float16",)),
                "skips the step whose gradients overflow on any worker, and with training.mode=pipeline each stage "
                "updates alone",
                NO_HALF_FLOATS,
            ),
            Refusal(
                "training.gradient_clipping",
                (),
                "is for the norm over all layers, and with training.mode=pipeline no worker has all gradients",
                NO_CLIPPING,
            ),
            Refusal(
                "training.ema",
                (),
                "averages the weights of the whole network after every step, and with training.mode=pipeline each "
                "worker has those of its stage",
                NO_AVERAGE,
            ),
            Refusal(
                "model.batch_norm_ranks",
                (1,),
                "sums over workers with the same layers, and with training.mode=pipeline consecutive workers hold "
                "different ones",
                OWN_BATCH_NORM,
            ),
            Refusal(
                "input.resolution_schedule",
                (),
                "changes the size of images, and with training.mode=pipeline the tensors between the stages have one "
                "size",
                "set input.resolution_schedule=[]",
            ),
            Refusal(
                "training.trace_steps",
                (),
                "records steps that are one graph, and with training.mode=pipeline each tick is one",
                NO_TRACE,
            ),
        )

    def idle(self) -> Sequence[Idle]:
        """See `ModeDeclaration`."""
        of_one = {"launch.num_workers": (self.stages,)}
        return (Idle("exchange.bucket_mib", "one pipeline exchanges no gradients", of_one, per_run=True),)


class ParameterServerConfig(ModeSettings):
    """Workers fetch weights from shards at all ranks and push gradients: Downpour, SSP, backup workers."""

    not_in_place: ClassVar[str] = (
        "lets a spare continue from the state of a worker, and with training.mode=parameter_server its shard has "
        "changed since"
    )
    is_tried_by_find_batch: ClassVar[bool] = False
    keeps_by_path: ClassVar[bool] = True
    metrics: ClassVar[Mapping[str, str]] = {
        "exchange/staleness": "updates by other workers between fetch and push of a worker, mean of the pushes to rank "
        "0",
        "exchange/staleness_max": "largest number of them",
        "exchange/dropped_share": "part of the pushes to rank 0 that came after their step",
        "exchange/step_gap_max": "largest difference of two workers in steps",
    }
    name: Literal["parameter_server"] = "parameter_server"
    synchrony: Literal["async", "ssp", "backup"] = "async"
    """`async`: no worker waits; `ssp`: a worker waits for workers that are `bound` steps behind; `backup`: every step
    waits for all workers but `backup_workers`."""
    bound: int = Field(default=3, ge=0)
    """Largest number of steps that a worker may be ahead of the slowest one, with `ssp`."""
    backup_workers: int = Field(default=1, ge=0)
    """Number of workers that no step waits for, with `backup`; 0 is synchronous training."""
    fetch_every: int = Field(default=1, gt=0)
    """Number of a worker's steps between two fetches of the weights, with `async`."""
    push_every: int = Field(default=1, gt=0)
    """Number of a worker's steps whose gradients are pushed as one sum, with `async`."""
    staleness_aware: bool = False
    """Whether a gradient that comes later than usual is applied at a lower rate, with `async` and `ssp`."""
    synchronous_steps: int = Field(default=0, ge=0)
    """Number of first optimizer steps that are synchronous, with `async` and `ssp`."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor of that name; settings of other synchronies are neutral."""
        free = self.synchrony == "async"
        return {
            **self.model_dump(exclude={"name"}),
            "fetch_every": self.fetch_every if free else 1,
            "push_every": self.push_every if free else 1,
            "backup_workers": self.unawaited_workers,
            "synchronous_steps": 0 if self.synchrony == "backup" else self.synchronous_steps,
        }

    @property
    def unawaited_workers(self) -> int:
        """See `ModeDeclaration`."""
        return self.backup_workers if self.synchrony == "backup" else 0

    def refusals(self) -> Sequence[Refusal]:
        """See `ModeDeclaration`."""
        return (
            Refusal(
                "launch.num_workers",
                range(self.unawaited_workers + 1, sys.maxsize),
                f"and training.mode.backup_workers={self.backup_workers} leave no worker for a step to wait for",
                "lower training.mode.backup_workers",
            ),
            Refusal(
                "exchange.codec",
                PUSHED_CODECS,
                "is for an exchange among all workers, and with training.mode=parameter_server each pushes alone",
                f"set exchange.codec to one of {', '.join(PUSHED_CODECS)}",
            ),
            Refusal(
                "training.precision",
                AllBut(("float16",)),
                "skips the step whose gradients overflow on all workers, and with training.mode=parameter_server each "
                "worker steps alone",
                NO_HALF_FLOATS,
            ),
            Refusal(
                "training.gradient_clipping",
                (),
                "is for the norm over all layers, and with training.mode=parameter_server no shard has all gradients",
                NO_CLIPPING,
            ),
            Refusal("training.ema", (), f"averages the weights after every step, and {_APART}", NO_AVERAGE),
            Refusal(
                "model.batch_norm_ranks", (1,), f"exchanges statistics in every step, and {_APART}", OWN_BATCH_NORM
            ),
            Refusal("training.trace_steps", (), f"compares the same steps of all workers, and {_APART}", NO_TRACE),
        )

    def idle(self) -> Sequence[Idle]:
        """See `ModeDeclaration`."""
        in_lock_step = "with training.mode.synchrony=backup no gradient that is late is applied"
        of_synchronies = (
            ("bound", ("ssp",), "it is the bound of training.mode.synchrony=ssp"),
            ("backup_workers", ("backup",), "they are those of training.mode.synchrony=backup"),
            ("fetch_every", ("async",), "only training.mode.synchrony=async fetches so rarely"),
            ("push_every", ("async",), "only training.mode.synchrony=async pushes so rarely"),
            ("staleness_aware", ("async", "ssp"), in_lock_step),
            ("synchronous_steps", ("async", "ssp"), in_lock_step),
        )
        return (
            *(Idle(f"training.mode.{key}", why) for key, having, why in of_synchronies if self.synchrony not in having),
            Idle("exchange.bucket_mib", "training.mode=parameter_server pushes each gradient by itself"),
            Idle("exchange.codec.owner_factor", "with training.mode=parameter_server no owner sends a sum"),
        )

    def beginning(self) -> Beginning | None:
        """See `ModeDeclaration`."""
        if self.synchrony == "backup":
            return None
        return Beginning(
            "training.mode.synchronous_steps", self.synchronous_steps, "workers always wait for each other"
        )


class ImportedModeConfig(Imported):
    """Your own training mode."""

    @property
    def declaration(self) -> ModeDeclaration:
        """The declaration at the path, created with the settings.

        Raises:
            ValueError: The import or the creation fails, the object is no declaration, or its module imports
                TensorFlow. The message is one line.
        """
        module, _, name = self.path.partition(":")
        had_tensorflow, setting = _TENSORFLOW in sys.modules, f"training.mode.path={self.path}"
        try:
            imported = importlib.import_module(module)
            named = {getattr(each, "__name__", "").partition(".")[0] for each in vars(imported).values()}
            brings_tensorflow = named & {_TENSORFLOW, "keras"} or (_TENSORFLOW in sys.modules and not had_tensorflow)
            found = None if brings_tensorflow else getattr(imported, name)(**self.settings)
        except Exception as error:  # foreign code may raise any exception
            raise ValueError(f"{setting}: {type(error).__name__}: {' '.join(str(error).split())}") from None
        if brings_tensorflow:
            raise ValueError(
                f"{setting}: module {module} imports TensorFlow, and the driver reads it: let `implementation` name a "
                "function of another module"
            )
        if not isinstance(found, ModeDeclaration):
            raise ValueError(f"{setting}: {name} is no ModeDeclaration")
        return found


ModeConfig = Annotated[
    SynchronousConfig | LocalConfig | DelayedConfig | PipelineConfig | ParameterServerConfig | ImportedModeConfig,
    Field(discriminator="name"),
]
MODES = {mode.model_fields["name"].default: mode for mode in ModeSettings.__subclasses__()}
"""The settings of this project's modes by name, which are also their declarations."""
