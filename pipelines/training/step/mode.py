"""What every training mode is, and what it is made from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from models.compression.codec import Codec
from models.compression.exchange.exchange import GradientExchange
from models.compression.exchange.wire import Collective
from models.losses import Loss
from models.optimizers.sharded import Shards
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.step import Accumulate, Step, StepClocks
from pipelines.training.step.weight_average import WeightAverage

CopyOptimizer = Callable[
    [Mapping[int, keras.Variable]], tuple[keras.optimizers.Optimizer, list[tuple[keras.Variable, float]]]
]
"""Makes an optimizer for copies of some of the model's variables, by the `id` of the variable; with rate factors."""


class MakeExchange(Protocol):
    """Makes an exchange as it is configured."""

    def __call__(self, collective: Collective = ..., codec: Codec | None = None) -> GradientExchange:
        """Return an exchange among all ranks with the configured codec, or among others, or with another one."""
        ...


class MakeOptimizer(Protocol):
    """Makes the optimizer as it is configured."""

    def __call__(self, shards: Shards | None = None) -> keras.optimizers.Optimizer:
        """Return it, built for the model's trainable variables; `shards` divides it among the ranks."""
        ...


@dataclass(frozen=True)
class ModeInputs:
    """What a rank makes its mode from; every rank makes the same calls."""

    collective: HorovodCollective
    """The ranks, in groups of as many as hold one copy of the model."""
    model: keras.Model
    """Maps a dict of image groups to logits `(batch, classes)`."""
    loss: Loss
    """Per-sample losses `(batch,)` from targets and logits."""
    micro_batches: int
    """Batches of this rank per optimizer step."""
    batch_size: int
    """Samples of each of them."""
    steps_per_epoch: int
    jit_compile: bool
    """Whether XLA compiles forward and backward pass."""
    rate_factors: Sequence[tuple[keras.Variable, float]]
    """Variables whose learning rate has a factor, each with it."""
    make_exchange: MakeExchange
    make_codec: Callable[[], Codec]
    make_optimizer: MakeOptimizer
    copy_optimizer: CopyOptimizer
    stop: StopAgreement | None = None
    """The agreement on when to stop, which a step includes where its ranks wait for each other; None: there is none."""
    loss_scale: LossScale | None = None
    """Scale of the loss for half floats."""
    average: WeightAverage | None = None
    """Takes the weights after every update."""
    clocks: StepClocks | None = None
    """Get the figures of each step; None: nobody asks."""


class Mode(Protocol):
    """How the ranks keep one model between them, on one rank.

    Optimizer and exchange may be others than the model's own only where the mode says so.
    """

    optimizer: keras.optimizers.Optimizer
    """The optimizer, whose state checkpoints hold; the loop sets its learning rate before each step."""
    exchange: GradientExchange
    """What the ranks exchange with, built; checkpoints hold its state."""
    step: Step
    """Takes the last or only batch of a step."""
    accumulate: Accumulate | None
    """Takes all micro-batches of a step but the last; None if a step has one batch."""
    shared: Sequence[keras.Variable]
    """State that is equal on every rank; rank 0 writes it into the checkpoint, beside model and optimizer."""
    own: Sequence[keras.Variable]
    """Variables, also of the optimizer, that differ between the ranks; each rank writes its own."""
    between: Sequence[tf.Variable]
    """What a rank holds only until the ranks come together again, so that no checkpoint has it."""

    def begin(self, step: int) -> None:
        """Start from the weights that all ranks have now, after so many optimizer steps; outside a graph."""
        ...

    def block(self, step: int) -> int:
        """Number of steps after which the ranks came together last, for a rank that has done `step` optimizer steps.

        Ranks with the same number can continue together, each from its own state.
        """
        ...

    def come_together(self) -> None:
        """Give all ranks one model, before validation and checkpoints; all ranks call it together, outside a graph."""
        ...

    def figures(self) -> dict[str, float]:
        """Figures of an epoch that only this mode has; `ModeDeclaration.metrics` says what they mean."""
        ...

    def payload_bytes(self) -> int:
        """Bytes that one step hands to the collective; see `GradientExchange.payload_bytes`."""
        ...

    def reset(self) -> None:
        """Forget what an unfinished step has left."""
        ...


class MakeMode(Protocol):
    """Makes a mode on a rank: the function that a line of the table, or `ModeDeclaration.implementation`, names.

    Its module may have a function `check_model(model, declaration, samples)` too, which the driver calls in a process
    of its own before any rank starts. It raises ValueError in one line if the mode cannot train the model; `samples`
    are images of two samples, and their seeds.
    """

    def __call__(self, inputs: ModeInputs, declaration: Any, /) -> Mode:
        """Make it; every rank makes the same call."""
        ...
