"""The contract of a training mode, and the inputs that it is made from."""

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
"""Makes an optimizer, with rate factors, for copies of some of the model's variables by the `id` of the variable."""


class MakeExchange(Protocol):
    """Makes an exchange as configured."""

    def __call__(self, collective: Collective = ..., codec: Codec | None = None) -> GradientExchange:
        """Return an exchange; defaults are all ranks and the configured codec."""


class MakeOptimizer(Protocol):
    """Makes the optimizer as configured."""

    def __call__(self, shards: Shards | None = None) -> keras.optimizers.Optimizer:
        """Return the optimizer, built for the model's trainable variables; `shards` divides it among the ranks."""


@dataclass(frozen=True)
class ModeInputs:
    """The inputs that a rank makes its mode from; every rank makes the same calls."""

    collective: HorovodCollective
    """The ranks, in groups that hold one copy of the model each."""
    model: keras.Model
    """Maps a dict of image groups to logits `(batch, classes)`."""
    loss: Loss
    """Per-sample losses `(batch,)` from targets and logits."""
    micro_batches: int
    """Number of this rank's batches per optimizer step."""
    batch_size: int
    """Number of samples per micro-batch."""
    steps_per_epoch: int
    jit_compile: bool
    """Whether XLA compiles forward and backward pass."""
    rate_factors: Sequence[tuple[keras.Variable, float]]
    """Variables whose learning rate has a factor, each with its factor."""
    make_exchange: MakeExchange
    make_codec: Callable[[], Codec]
    make_optimizer: MakeOptimizer
    copy_optimizer: CopyOptimizer
    stop: StopAgreement | None = None
    """The agreement on when to stop. A step whose ranks wait for each other includes it. None: there is none."""
    loss_scale: LossScale | None = None
    """Scale of the loss for half floats."""
    average: WeightAverage | None = None
    """Takes the weights after every update."""
    clocks: StepClocks | None = None
    """Receive the figures of each step; None: figures are not measured."""


class Mode(Protocol):
    """A training mode on one rank: it decides how the ranks train one model together.

    Optimizer and exchange may differ from the model's own only if the mode says so.
    """

    optimizer: keras.optimizers.Optimizer
    """The optimizer. Checkpoints hold its state, and the loop sets its learning rate before each step."""
    exchange: GradientExchange
    """The exchange of the ranks, already built; checkpoints hold its state."""
    step: Step
    """Takes the last or only batch of a step."""
    accumulate: Accumulate | None
    """Takes all micro-batches of a step except the last; None if a step has one batch."""
    shared: Sequence[keras.Variable] = ()
    """State that is equal on every rank. Rank 0 writes it into the checkpoint with model and optimizer."""
    own: Sequence[keras.Variable] = ()
    """Variables, also of the optimizer, that differ between ranks; each rank writes its own."""
    between: Sequence[tf.Variable] = ()
    """Variables that a rank needs only until the ranks come together again. No checkpoint on disk contains them."""

    def begin(self, step: int) -> None:
        """Start from the weights that all ranks have after `step` optimizer steps; called outside a graph.

        A mode whose ranks always have the same weights does nothing.
        """
        return

    def block(self, step: int) -> int:
        """Return the step at which the ranks last came together, for a rank that has done `step` optimizer steps.

        Ranks with the same number can continue together, each from its own state. A mode whose ranks come together in
        every step returns `step`.
        """
        return step

    def come_together(self) -> None:
        """Give all ranks one model before validation and checkpoints; all ranks call this together, outside a graph."""

    def figures(self) -> dict[str, float]:
        """Return the epoch figures that only this mode has; `ModeDeclaration.metrics` explains them."""

    def payload_bytes(self) -> int:
        """Return the bytes that one step passes to the collective; see `GradientExchange.payload_bytes`."""

    def reset(self) -> None:
        """Discard the sums and flags of an unfinished step."""


class MakeMode(Protocol):
    """Makes a mode on a rank: the function that the table or `ModeDeclaration.implementation` names.

    Its module may also have a function `check_model(model, declaration, samples)`. The driver calls it in a separate
    process before any rank starts. It raises a ValueError of one line if the mode cannot train the model. `samples` are
    the images of two samples and their seeds.
    """

    def __call__(self, inputs: ModeInputs, declaration: Any, /) -> Mode:
        """Make the mode; every rank makes the same call."""
