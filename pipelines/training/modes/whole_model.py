"""The exchange of stages between the ranks of a pipeline, before validation and checkpoints."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from models.networks.stages import Stage
from pipelines.training.modes.optimizer_state import state_of
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.step.accumulation import moving_statistics


class WholeModel:
    """Gives every rank the whole model and the whole state of the optimizer.

    The moving statistics of a stage become their mean over the stage's ranks. Weights and the optimizer's state are
    equal on these ranks, and are taken from the first pipeline.
    """

    def __init__(
        self, stages: Sequence[Stage], optimizer: keras.optimizers.Optimizer, collective: HorovodCollective
    ) -> None:
        """Find the variables of each stage.

        Args:
            stages: All stages of the network.
            optimizer: The optimizer, built for the variables of all stages.
            collective: The ranks; every group has one rank per stage.

        Raises:
            ValueError: A variable of the optimizer belongs to no variable of the network, or to several.
        """
        self._collective = collective
        self._statistics = moving_statistics(stages[collective.group.rank].network)
        trained = [variable for stage in stages for variable in stage.network.trainable_variables]
        self._of_stages = [
            [*stage.network.variables, *state_of(stage.network.trainable_variables, trained, optimizer)]
            for stage in stages
        ]

    def come_together(self) -> None:
        """Copy every stage from its ranks; all ranks call this together, outside a graph."""
        peers = self._collective.peers
        if peers.size > 1 and self._statistics:
            sums = peers.allreduce([tf.convert_to_tensor(each.value) for each in self._statistics])
            for variable, total in zip(self._statistics, sums, strict=True):
                variable.assign(total / peers.size)
        for number, variables in enumerate(self._of_stages):
            self._collective.broadcast([variable.value for variable in variables], root=number)
