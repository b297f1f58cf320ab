"""What to say when a rank's accelerator runs out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import keras
import tensorflow as tf

from conf.schema import RunConfig
from models.compression.exchange.exchange import GradientExchange
from pipelines.dataset.manifest import Manifest
from pipelines.training.collective import ranks_on_host
from pipelines.training.finders.batches import FRACTION
from pipelines.training.finders.memory import memory_limit
from pipelines.training.finders.needs import estimate


@contextmanager
def shortage_explained(
    config: RunConfig,
    manifest: Manifest,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    exchange: GradientExchange,
) -> Iterator[None]:
    """Say of TensorFlow's error which rank, batch and model were too large, and a batch that would fit.

    Raises:
        MemoryError: In place of TensorFlow's error.
    """
    try:
        yield
    except tf.errors.ResourceExhaustedError:
        micro_batches = config.accumulation_steps(exchange.collective.size) or 1
        needs = estimate(model, optimizer, exchange, manifest, accumulates=micro_batches > 1)
        batch_size = config.training.batch_size_per_worker
        # This batch did not fit, whatever the estimate says.
        fitting = batch_size // 2
        with suppress(RuntimeError):
            fitting = min(fitting, needs.fitting(FRACTION * memory_limit(ranks_on_host()).bytes))
        advice = (
            f"lower it to {fitting}, with training.accumulation_steps or training.global_batch_size for the same "
            "global batch, or let `groundswell find-batch` find the largest that fits"
            if fitting > 0
            else "not even a batch of 1 is estimated to fit: choose a smaller model or more memory"
        )
        text = (
            f"rank {exchange.collective.rank} ran out of memory with training.batch_size_per_worker={batch_size} "
            f"({needs.describe()}): {advice}"
        )
    else:
        return
    # Outside the handler, so that TensorFlow's trace of the graph does not follow.
    raise MemoryError(text)
