"""The search for the largest batch on every rank: real steps of the real model, on images of zeros."""

import keras
import numpy as np
import tensorflow as tf

from conf.schema import RunConfig
from models.layers.augmentation import AugmentedModel
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.training.finders.batches import BatchSearch, Trial, batch_multiple, next_batch_size
from pipelines.training.memory.memory import MemoryLimit, memory_limit, resident_peak
from pipelines.training.memory.needs import estimate
from pipelines.training.ranks.collective import HorovodCollective, ranks_on_host
from pipelines.training.ranks.events import BatchTried, tell
from pipelines.training.setup.objective import make_loss
from pipelines.training.setup.rank_setup import RankSetup, agree_on_kernels, join_ranks
from pipelines.training.setup.recipe import freeze_layers, make_model
from pipelines.training.setup.trainer import make_mode_of, make_trainer
from pipelines.training.step.loop import Trainer
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.weight_average import WeightAverage


def batch_search_worker(config: RunConfig, largest_allowed: int) -> BatchSearch:
    """Try increasing batch sizes on all ranks together; every rank makes the same call and gets the same result.

    Every trial is two complete training steps, with the exchange and the optimizer's update at rate 0. Batch norm
    computes its statistics on each rank separately.

    Args:
        config: The whole configuration; its batch size is not used.
        largest_allowed: No larger batch is tried.
    """
    collective = join_ranks()
    keras.utils.set_random_seed(config.training.seed)
    manifest = read_manifest(config.dataset.path)
    model = make_model(config, manifest)
    freeze_layers(config.warm_start, model)
    agree_on_kernels(config.exchange.codec.name, collective)
    # On a GPU a rank gets an error if memory is full. All ranks share it before the exchange, so no rank waits forever.
    accumulates = config.training.accumulation_steps > 1 or config.training.global_batch_size is not None or _on_gpu()
    loss, micro_batches = make_loss(config.training, manifest), 2 if accumulates else 1
    setup = RankSetup(collective, manifest, micro_batches, model, loss)
    mode = make_mode_of(
        config,
        setup,
        steps_per_epoch=1,  # the ranks come together in every step
        loss_scale=LossScale() if config.training.precision == "float16" else None,
        average=WeightAverage(model, config.training.ema) if config.training.ema is not None else None,
    )
    mode.begin(0)
    needs = estimate(model, mode, manifest, accumulates=accumulates)
    trainer = make_trainer(config.training, setup, mode, lambda step: 0.0)
    mode.optimizer.learning_rate = 0.0
    limit = _least(collective, memory_limit(ranks_on_host()))
    trials: list[Trial] = []
    while size := next_batch_size(needs, limit, largest_allowed, trials, batch_multiple(config.training)):
        if collective.rank == 0:
            tell(BatchTried(batch_size=size))
        trials.append(_try(size, trainer, manifest, augments=isinstance(model, AugmentedModel)))
    return BatchSearch(needs, limit, largest_allowed, trials)


def _try(size: int, trainer: Trainer, manifest: Manifest, *, augments: bool) -> Trial:
    collective = trainer.collective
    images = {group.name: tf.zeros((size, *group.shape), group.dtype) for group in manifest.groups}
    targets = tf.zeros((size, len(manifest.class_names)))
    batch = (images, targets, tf.zeros(size, tf.int32) if augments else None)
    if trainer.accumulate is not None:
        failed = 0
        try:
            trainer.accumulate(*batch)
        except tf.errors.ResourceExhaustedError:
            failed = 1
        if collective.sum(np.array([failed]))[0] > 0:
            return Trial(size, _peak(collective), out_of_memory=True)
        trainer.step(*batch)
    else:
        for _ in range(2):  # the first step compiles; the second one runs with the remaining memory
            trainer.step(*batch)
    return Trial(size, _peak(collective))


def _peak(collective: HorovodCollective) -> int:
    """Return the largest memory of any rank so far: resident memory, or GPU memory taken by TensorFlow."""
    own = tf.config.experimental.get_memory_info("GPU:0")["peak"] if _on_gpu() else resident_peak()
    return int(collective.concatenate(np.array([own], np.int64)).max())


def _least(collective: HorovodCollective, own: MemoryLimit) -> MemoryLimit:
    """Return the limit of the rank with the least memory, which may be on another host."""
    limits = collective.concatenate(np.array([own.bytes], np.int64))
    least = int(np.argmin(limits))
    if int(limits[least]) == own.bytes:
        return own
    return MemoryLimit(int(limits[least]), f"rank {least}'s memory, {int(limits[least]) / 2**20:,.0f} MiB")


def _on_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))
