"""The steps that a spare takes before it replaces a rank, so that its graphs are already compiled then."""

import itertools
import logging
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from conf.sections.training import TrainingConfig
from models.layers.grids import Size
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import Batch
from pipelines.launch.rank import membership
from pipelines.training.ranks.collective import job_of_one
from pipelines.training.setup.rank_setup import RankSetup, make_inputs
from pipelines.training.step.loop import Trainer
from pipelines.training.step.step import Traceable

_log = logging.getLogger(__name__)


def step_ahead(
    training: TrainingConfig, setup: RankSetup, trainer: Trainer, sizes: Sequence[Size | None], *, has_room: bool
) -> None:
    """Take steps on zeros in a spare before it replaces a rank; the first step of a size compiles its graphs.

    The steps belong to a job of only this process. The state that the spare takes over later overwrites their changes.
    A codec whose ranks gather each other's messages fails in such a step after encoding. A sharded optimizer fails
    after the gradients. The rest of the step is then compiled when the rank needs it.

    Args:
        training: The settings of the training.
        setup: The setup of the spare.
        trainer: The trainer with its steps.
        sizes: Image size of each remaining epoch. The size that is needed first is compiled first.
        has_room: Whether the memory is sufficient for a step. If not, the graphs are only traced.
    """
    steps: tuple[object, ...] = (trainer.accumulate, trainer.step)
    graphs = [graph for graph in steps if isinstance(graph, Traceable)]
    if not graphs or membership.is_turn():
        return
    batch, began = _zeros(setup.model, setup.manifest, training.batch_size_per_worker), time.monotonic()
    made = [make_inputs(training, setup.model, 0, size)(batch) for size in dict.fromkeys(sizes)]
    for inputs in made:
        if inputs is not made[0] and membership.is_turn():
            return
        for graph in graphs:
            graph.get_concrete_function(*inputs)
    if not has_room:
        return
    try:
        with job_of_one():
            for inputs, graph in itertools.product(made, graphs):
                if membership.is_turn():
                    return
                graph(*inputs)
    except (tf.errors.OpError, HorovodInternalError, ValueError) as error:
        _log.info("took a part of a step ahead: %s", str(error).partition("\n")[0])
    else:
        _log.info("took a step ahead (%.1f s)", time.monotonic() - began)


def _zeros(model: keras.Model, manifest: Manifest, size: int) -> Batch:
    """Return a batch for the model with `size` samples that are all zeros."""
    return Batch(
        {
            group.name: np.zeros((size, *group.shape), group.dtype)
            for group in manifest.groups
            if group.name in model.input
        },
        np.zeros((size, len(manifest.class_names)), np.uint8),
        np.ones(size, np.float32),
        np.zeros(size, np.int64),
    )
