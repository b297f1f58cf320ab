"""Three training modes that come by import path, as the driver reads them: without TensorFlow."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from conf.sections.mode_declaration import ModeDeclaration, Refusal, multiples_of


class Averaging(ModeDeclaration):
    """Every rank trains alone, and every few steps all take the mean of their weights."""

    implementation = "made_modes:make_averaging"

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def refusals(self) -> Sequence[Refusal]:
        reason, allowed = "has a checkpoint between two means", multiples_of(self.every_steps)
        return (Refusal("training.checkpoint_every_steps", allowed, reason, f"set a multiple of {self.every_steps}"),)

    def exchanges(self, epochs: int, steps_per_epoch: int) -> int:
        return epochs * -(-steps_per_epoch // self.every_steps)


class Halves(ModeDeclaration):
    """Two consecutive ranks hold one copy of the model, and each computes half of every batch."""

    implementation = "made_modes:make_halves"
    not_in_place = "replaces a half"
    is_tried_by_find_batch = False
    metrics: ClassVar[Mapping[str, str]] = {"exchange/halves": "halves of batches that rank 0 has computed so far"}

    @property
    def ranks_per_copy(self) -> int:
        return 2


class Alone(ModeDeclaration):
    """No step has a collective: ranks take the mean of their weights at the end of an epoch."""

    implementation = "made_modes:make_alone"
