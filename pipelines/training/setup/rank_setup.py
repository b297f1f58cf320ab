"""The setup, mode and trainer of one rank, made from the configuration; training and the finders start with them."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np

from conf.schema import RunConfig
from conf.sections.dataset import ReaderConfig
from conf.sections.training import TrainingConfig
from models.compression import kernels
from models.compression.arithmetic.graph import Marks
from models.layers.augmentation import AugmentedModel, augmentation_seeds
from models.layers.grids import Size
from models.layers.normalisation import normalise_over, statistics_bytes
from models.losses import Loss
from models.networks.whitening import whiten
from models.schedules import Schedule
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.launch.rank import membership
from pipelines.launch.rank.report import attempt, log_to_driver
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location
from pipelines.training.checkpoint.files import list_checkpoints
from pipelines.training.checkpoint.in_memory import rank_uses_kernels
from pipelines.training.ranks.collective import HorovodCollective, ranks_of_job, use_assigned_devices
from pipelines.training.ranks.stop import StopAgreement
from pipelines.training.setup.bands import seen_bands, used_groups
from pipelines.training.setup.input import reader_settings
from pipelines.training.setup.recipe import freeze_layers, make_loss, make_mode, make_model
from pipelines.training.setup.warm_start import begin_with
from pipelines.training.step.loop import Trainer
from pipelines.training.step.loss_scale import LossScale
from pipelines.training.step.mode import Mode
from pipelines.training.step.step import StepClocks
from pipelines.training.step.step_inputs import Mixing, StepInputs
from pipelines.training.step.weight_average import WeightAverage
from pipelines.training.tracing.timeline import allow_timeline

_WHITENING_SAMPLES = 4096
"""The maximum number of training images whose patches a whitening convolution is made from."""
_WHITENING_VALUES, _VALUES_AT_ONCE = 3 * 2**22, 3 * 2**18
"""The maximum of pixels times bands that are read for it in total, and in one batch. A single image may have more."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankSetup:
    """The ranks, the dataset, the model and the loss of one rank; every rank makes them with the same calls."""

    collective: HorovodCollective
    manifest: Manifest
    micro_batches: int
    """Number of this rank's batches per optimizer step."""
    model: keras.Model
    loss: Loss
    batch_norm_bytes: int = 0
    """Payload per step that batch norm over ranks adds: bytes of an allreduce over all ranks with the same cost."""


def make_rank_setup(config: RunConfig, checkpoint_folder: Location | None = None) -> RankSetup:
    """Join the ranks and make the setup of this rank; a later broadcast gives all ranks the weights of rank 0.

    Args:
        config: The whole configuration.
        checkpoint_folder: Folder where an earlier attempt of the run may have left checkpoints, which have all weights;
            None: there was no such attempt.
    """
    if config.training.trace_steps is not None:
        allow_timeline()
    in_copy, span = config.training.mode.declaration.ranks_per_copy, config.model.batch_norm_span(ranks_of_job())
    collective = join_ranks(max(in_copy, span), has_peers=in_copy > 1)
    # The same seed on every rank gives the same weights, and the broadcast guarantees it.
    keras.utils.set_random_seed(config.training.seed)
    manifest = read_manifest(config.dataset.path)
    model = make_model(config, manifest)
    if span > 1:
        normalise_over(model, collective.group)
    _begin(config, manifest, model, collective, checkpoint_folder)
    codec, files = config.exchange.codec.name, membership.shared_memory_files()[:2]
    if not membership.is_spare():
        agree_on_kernels(codec, collective)
    elif codec in kernels.CODECS and rank_uses_kernels(files, give_up=membership.is_turn) is False:
        kernels.disable()  # like the process that this spare may replace
    micro_batches = config.accumulation_steps(collective.size)  # more of them if ranks are lost
    assert micro_batches is not None, "the driver checks that the global batch divides"
    loss = make_loss(config.training, manifest)
    statistics = _batch_norm_bytes(model, collective, micro_batches) if span > 1 else 0
    return RankSetup(collective, manifest, micro_batches, model, loss, statistics)


def join_ranks(group_size: int = 1, *, has_peers: bool = False) -> HorovodCollective:
    """Join the job on the devices that the launcher assigned; for the arguments see `HorovodCollective`."""
    collective = HorovodCollective(group_size, has_peers=has_peers)
    use_assigned_devices()
    return collective


def agree_on_kernels(codec: str, collective: HorovodCollective) -> None:
    """Use the C++ kernels on all ranks or on none: each rank decodes by itself, and Python code rounds differently."""
    if codec in kernels.CODECS:
        (loaded,) = collective.sum(np.array([int(kernels.load() is not None)]))
        if loaded < collective.size:
            if loaded:
                _log.warning("%d of %d ranks have C++ kernels for compression: none uses them", loaded, collective.size)
            kernels.disable()


def use_kernels(codec: str) -> bool:
    """Return whether this rank uses C++ kernels; called after all ranks have agreed."""
    return codec in kernels.CODECS and kernels.load() is not None


def make_inputs(training: TrainingConfig, model: keras.Model, epoch: int, size: Size | None = None) -> StepInputs:
    """Return the function from a batch of this epoch to the inputs of a step, with seeds and the configured mixup.

    Args:
        training: The settings of the training.
        model: The model of `make_rank_setup`.
        epoch: Index of the epoch, from 0.
        size: Height and width of the images in this epoch, see `pipelines.training.setup.resolution`; None: those of
            the dataset.
    """
    augments = isinstance(model, AugmentedModel)
    return StepInputs(
        functools.partial(augmentation_seeds, training.seed, epoch) if augments else None,
        Mixing(training.mixup, training.seed, epoch) if training.mixup else None,
        size,
    )


def _batch_norm_bytes(model: keras.Model, collective: HorovodCollective, micro_batches: int) -> int:
    """Return the bytes per step and log them on rank 0; a rank sends 2 (k - 1) / k bytes per summed byte."""
    k, n = collective.group.size, collective.size
    added = round(micro_batches * statistics_bytes(model) * (k - 1) / k * n / (n - 1))
    if collective.rank == 0 and not membership.is_spare():
        log_to_driver(f"batch norm over {k} ranks adds {added:,} bytes to each step's payload")
    return added


def _begin(
    config: RunConfig,
    manifest: Manifest,
    model: keras.Model,
    collective: HorovodCollective,
    checkpoint_folder: Location | None,
) -> None:
    """Set the weights that are not random on rank 0, for a later broadcast; freeze layers on every rank."""
    frozen = freeze_layers(config.warm_start, model)
    # A spare gets all weights from the process that it replaces.
    if config.training.resume_run is not None or collective.rank != 0 or membership.is_spare():
        return
    if attempt() > 1 and checkpoint_folder is not None and list_checkpoints(checkpoint_folder):
        return  # the source may no longer exist, and the checkpoint replaces its weights
    lines, bands = [], config.input.bands
    if config.model.whitens:
        lines = [begin_whitened(model, config.dataset.path, config.reader, manifest, bands)]
    if config.warm_start.source is not None:
        # The filters stay those of the dataset, unless the earlier training has some. The lines say which.
        lines = begin_with(model, config.warm_start, manifest, bands)
        if frozen:
            lines.append(f"{len(frozen)} layers are frozen: {', '.join(frozen)}")
    for line in lines:
        log_to_driver(line)


def begin_whitened(
    model: keras.Model, dataset: str, reader: ReaderConfig, manifest: Manifest, bands: Sequence[str] | None
) -> str:
    """Set the filters of the model's whitening convolution from the first rows of the training split.

    `prepare` has shuffled the split, so these rows are a random part of it, in as few files as possible.

    Args:
        model: The model, which has a whitening convolution.
        dataset: `dataset.path`.
        reader: The reader's section.
        manifest: Manifest of the dataset.
        bands: `input.bands`.

    Returns:
        A sentence that says what was done.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: See `SplitReader`; ValueError also for pixels that are not finite.
    """
    pixels = max(group.shape[0] * group.shape[1] for group in used_groups(manifest.groups, bands))
    values = pixels * len(seen_bands(manifest.groups, bands))
    split = SplitReader(dataset, TRAINING_SPLIT, reader_settings(reader))
    rows = np.arange(min(len(split), _WHITENING_SAMPLES, max(1, _WHITENING_VALUES // values)), dtype=np.int64)
    size = max(1, _VALUES_AT_ONCE // values)
    whiten(model, (split.gather(rows[first : first + size]).images for first in range(0, len(rows), size)))
    return f"the first convolution whitens patches by {len(rows):,} training images"


def make_mode_of(
    config: RunConfig,
    setup: RankSetup,
    *,
    steps_per_epoch: int,
    stop: StopAgreement | None = None,
    loss_scale: LossScale | None = None,
    average: WeightAverage | None = None,
    clocks: StepClocks | None = None,
) -> Mode:
    """Make the configured mode for the setup of a rank; for the arguments see `make_mode`."""
    return make_mode(
        config,
        setup.model,
        setup.loss,
        setup.collective,
        steps_per_epoch=steps_per_epoch,
        micro_batches=setup.micro_batches,
        marks=Marks() if config.training.trace_steps is not None else None,
        stop=stop,
        loss_scale=loss_scale,
        average=average,
        clocks=clocks,
    )


def make_trainer(
    training: TrainingConfig, setup: RankSetup, mode: Mode, schedule: Schedule, stop: StopAgreement | None = None
) -> Trainer:
    """Make the trainer that turns the batches of this rank into updates.

    Args:
        training: The settings of the training.
        setup: The setup of this rank.
        mode: The mode that takes the steps.
        schedule: Learning rate by optimizer step.
        stop: The agreement on when to stop, which `mode` includes; None: training cannot be asked to stop.
    """

    def reset() -> None:
        mode.reset()
        if stop is not None:
            stop.forget()

    return Trainer(
        step=mode.step,
        optimizer=mode.optimizer,
        schedule=schedule,
        collective=setup.collective,
        stop=stop,
        accumulate=mode.accumulate,
        micro_batches=setup.micro_batches,
        reset=reset,
        block=mode.block,
        ranks_per_copy=training.mode.declaration.ranks_per_copy,
    )
