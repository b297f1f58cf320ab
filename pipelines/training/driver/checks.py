"""The driver's checks of a training before any rank starts; this module imports no TensorFlow."""

import logging
import math
from collections.abc import Iterable, Sequence

from conf.schema import RunConfig, check_length
from conf.sections.augmentations import AugmentationConfig, PadCropConfig
from conf.sections.dataset import ReaderConfig
from conf.sections.input import InputConfig
from conf.sections.launch import TrackingConfig
from conf.sections.networks import ModelConfig
from conf.sections.training import TrainingConfig
from models.layers.grids import shift_units
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.dataset.read.reader import check_readable, window_rows
from pipelines.machine.console import counted
from pipelines.machine.packages import check_backend, require
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT, ImageGroup
from pipelines.storage.folder import Location
from pipelines.tracking.journal.local_run import read_local_run
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP, unlisted, validation_metrics
from pipelines.tracking.store import queries
from pipelines.training.checkpoint.files import check_writable, checkpoint_path, list_checkpoints
from pipelines.training.checkpoint.selection import best_of, best_step, is_over, why_ended
from pipelines.training.checkpoint.settings import check_same_order, check_same_training, recorded_settings
from pipelines.training.checkpoint.state import RETAINED, TrainingState, newest_state
from pipelines.training.driver.output import (
    CHECKPOINTS,
    check_output_location,
    checkpoints_of,
    records_folder,
    run_location,
)
from pipelines.training.driver.trial import has_own_parts, try_parts
from pipelines.training.setup.bands import used_groups
from pipelines.training.setup.class_weights import class_weights
from pipelines.training.setup.input import order_of, reader_settings
from pipelines.training.setup.rates import make_schedule
from pipelines.training.setup.resolution import full_size, trained_sizes
from pipelines.training.setup.warm_start import check_source

_log = logging.getLogger(__name__)


def check_dataset(config: RunConfig) -> Manifest:
    """Read the dataset's manifest and check that this configuration can train on it.

    Raises:
        FileNotFoundError: The dataset does not exist.
        ValueError: The training split is missing or has fewer rows than one global batch. A shard is damaged, or the
            cache is too small. A schedule does not fit the number of steps, or the model cannot use the images. A
            metric or class does not exist, or a part by import path does not fit. A setting has no effect on this
            dataset, or Keras's backend is not TensorFlow.
        RuntimeError: The process that builds such a part died, or the reader's package is not installed.
    """
    check_backend("training")
    dataset, training = config.dataset.path, config.training
    manifest = read_manifest(dataset)
    if TRAINING_SPLIT not in manifest.splits:
        raise ValueError(f"{dataset} has no training split, only {manifest.split_names()}")
    _check_steps(config, manifest)
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    _check_trace(training, steps)
    if (warning := check_length(training, config.exchange, steps)) is not None:
        _log.warning(warning)
    make_schedule(config, steps)
    workers = config.launch.num_workers
    _check_reader(dataset, config.reader, manifest, workers=workers, copies=config.copies(workers))
    _check_model_input(dataset, config.input, config.model, manifest)
    trained_sizes(config, manifest, steps)
    check_own_metrics(training.metrics)
    _check_selection(dataset, training, config.tracking, manifest)
    class_weights(training.class_weights, manifest)
    if training.resume_run is None:  # otherwise the checkpoint has all weights
        check_source(config.warm_start)
    if has_own_parts(config):
        try_parts(config, manifest)
    # Petastorm's reader reads the training split without our cache. For whitening, our reader reads a part of it.
    with_own = config.reader.name != "petastorm" or config.model.whitens
    splits = [TRAINING_SPLIT, VALIDATION_SPLIT] if with_own else [VALIDATION_SPLIT]
    if not check_readable(
        dataset, manifest, (split for split in splits if split in manifest.splits), reader_settings(config.reader)
    ):
        _check_cache_is_default(dataset, config.reader)
    return manifest


def check_resume(config: RunConfig, manifest: Manifest) -> None:
    """Check that the run of `training.resume_run` can be continued.

    A run with all epochs done can be continued if its model was not logged. Only the missing part is then done.

    Raises:
        FileNotFoundError: The run has no checkpoints under `training.output`.
        ValueError: All checkpoints are damaged or of another training, the run is finished, or MLflow does not know it.
        RuntimeError: MLflow does not answer.
    """
    training, offline = config.training, config.tracking.offline
    run_id = training.resume_run
    if run_id is None:
        return
    path, state = newest_state(checkpoints_of(training.output, run_id))
    check_same_training(path, state, recorded_settings(config), config.global_batch_size, manifest)
    if state.epochs_done > training.epochs:
        raise ValueError(
            f"{path} has done {counted(state.epochs_done, 'epoch')}, more than training.epochs={training.epochs}: "
            "raise training.epochs to continue"
        )
    _check_not_beyond_the_end(path, state, training)
    if state.epochs_done == training.epochs and _is_finished(training.output, run_id, offline=offline):
        raise ValueError(
            f"{path} has done {counted(state.epochs_done, 'epoch')}, and the model is logged: "
            "raise training.epochs to continue"
        )
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    _check_best(path, state, training, steps, offline=offline)
    if state.is_within_an_epoch:
        is_ours, settings = config.reader.name != "petastorm", reader_settings(config.reader)
        window = window_rows(config.dataset.path, manifest, TRAINING_SPLIT, settings) if is_ours else None
        check_same_order(path, state, order_of(config.reader, window))


def check_output(training: TrainingConfig, dataset: str) -> None:
    """Check that the driver can write to `training.output`, and that the checkpoints of a resumed run fit there.

    For a new run only rank 0 knows the size of the checkpoints, and it checks the space before the first step.

    Args:
        training: The settings with the output and the run to resume.
        dataset: `dataset.path`.

    Raises:
        ValueError: The folder of a new run is in the dataset.
        RuntimeError: The folder cannot be written, or its disk has too little free space.
    """
    check_output_location(training.output, dataset)
    run_id = training.resume_run
    location = Location(training.output) if run_id is None else run_location(training.output, run_id)
    if run_id is None or not location.is_local:
        check_writable(location)
        return
    path, _ = newest_state(location / CHECKPOINTS)
    size = sum(part.stat().st_size for part in (location / CHECKPOINTS).path.glob(f"{path.stem}*.npz"))
    written = len(list_checkpoints(location / CHECKPOINTS))
    retained = RETAINED + (training.selection.metric is not None)
    check_writable(location, size * (retained + 1 - min(retained, written)))


def _is_finished(output: str, run_id: str, *, offline: bool) -> bool:
    """Return whether only more epochs are left to do for a run; without the store, `groundswell sync` finishes it."""
    if not offline:
        return queries.is_finished(run_id)
    local = read_local_run(records_folder(output) / run_id)
    return local is not None and local.status in ("TRAINED", "FINISHED")


def batch_text(config: RunConfig) -> str:
    """Return a text that shows the factors of the global batch size."""
    workers = config.launch.num_workers
    accumulated = config.accumulation_steps(workers) or 1
    micro_batches = f" x {accumulated} micro-batches" if accumulated > 1 else ""
    copies = _copies_text(workers, config.copies(workers))
    return f"{copies}{micro_batches} x {config.training.batch_size_per_worker}"


def _copies_text(workers: int, copies: int) -> str:
    """Return the number and kind of the model copies that take different samples, as text."""
    return f"{workers} workers" if copies == workers else f"{copies} pipelines"


def _check_not_beyond_the_end(path: Location, state: TrainingState, training: TrainingConfig) -> None:
    """Check that a finished training would not log the model of a checkpoint inside a later epoch."""
    selection, epochs = training.selection, training.epochs
    if not state.is_within_an_epoch or (state.epochs_done < epochs and not is_over(state.history, selection)):
        return
    best = best_of(state.history, selection) if selection.model == "best" else None
    if best is None or best.epoch == state.epochs_done:
        raise ValueError(
            f"{path} is in the middle of epoch {state.epochs_done + 1}, and training would end "
            f"{why_ended(state.history, selection, epochs)}: raise training.epochs or training.selection.patience to "
            "continue"
        )


def _check_best(path: Location, state: TrainingState, training: TrainingConfig, steps: int, *, offline: bool) -> None:
    """Check that training can continue with the selection rule, and that the best epoch's checkpoint exists."""
    selection, run_id = training.selection, training.resume_run or ""
    if is_over(state.history, selection) and _is_finished(training.output, run_id, offline=offline):
        raise ValueError(
            f"{path} ended {why_ended(state.history, selection, training.epochs)}, and the model is logged: raise "
            "training.selection.patience to continue"
        )
    best = best_step(state.history, selection, steps)
    if best is not None and selection.model == "best" and not checkpoint_path(path.parent, best).is_file():
        raise ValueError(
            f"by training.selection.metric={selection.metric} the best epoch is that of "
            f"{checkpoint_path(path.parent, best)}, which is not there: set training.selection as it was, or "
            "training.selection.model=last"
        )


def check_own_metrics(names: Iterable[str]) -> None:
    """Check that the user's metrics have new names.

    Args:
        names: Names of the metrics in `training.metrics`.

    Raises:
        ValueError: A metric has the name of a built-in metric.
    """
    for name in names:
        if not unlisted([f"{VALIDATION_GROUP}/{name}"]):
            raise ValueError(f"training.metrics.{name}: every training has a metric of that name, choose another one")


def _check_selection(dataset: str, training: TrainingConfig, tracking: TrackingConfig, manifest: Manifest) -> None:
    chosen = [("training.selection.metric", training.selection.metric)]
    if tracking.registered_model is not None and tracking.promote_metric != tracking.default("promote_metric"):
        chosen.append(("tracking.promote_metric", tracking.promote_metric))
    for setting, metric in chosen:
        if metric is not None:
            _check_validation_metric(setting, metric, dataset, training, manifest)


def _check_validation_metric(
    setting: str, metric: str, dataset: str, training: TrainingConfig, manifest: Manifest
) -> None:
    if VALIDATION_SPLIT not in manifest.splits:
        raise ValueError(
            f"{setting}={metric} needs a validation split, and {dataset} has only "
            f"{', '.join(sorted(manifest.splits))}: leave out {setting}"
        )
    known = validation_metrics(
        manifest.task, len(manifest.class_names), averaged=training.ema is not None, own=list(training.metrics)
    )
    if metric not in known:
        averaged = metric.startswith(f"{AVERAGED_GROUP}/") and training.ema is None
        remedy = ", and training.ema is null" if averaged else ""
        raise ValueError(f"{setting}={metric} should be one of {', '.join(known)}{remedy}")


def _check_steps(config: RunConfig, manifest: Manifest) -> None:
    rows, workers = manifest.splits[TRAINING_SPLIT].rows, config.launch.num_workers
    copies = config.copies(workers)
    batch_size = config.training.batch_size_per_worker
    if config.accumulation_steps(workers) is None:
        raise ValueError(
            f"training.global_batch_size={config.global_batch_size} does not divide into batches of {batch_size} on "
            f"each of {_copies_text(workers, copies)}: make it a multiple of {copies * batch_size}, or change "
            "launch.num_workers or training.batch_size_per_worker"
        )
    if steps_per_epoch(rows, config.global_batch_size) == 0:
        factor = "training.accumulation_steps" if config.training.accumulation_steps > 1 else "launch.num_workers"
        given = config.training.global_batch_size is not None
        lower = "training.global_batch_size" if given else f"training.batch_size_per_worker or {factor}"
        raise ValueError(
            f"{config.dataset.path} has {rows} training samples, fewer than one global batch of "
            f"{config.global_batch_size} ({batch_text(config)}): lower {lower}"
        )


def _check_trace(training: TrainingConfig, steps: int) -> None:
    traced, epochs = training.trace_steps, training.epochs
    if traced is not None and traced[1] > epochs * steps:
        raise ValueError(
            f"training.trace_steps={traced} is beyond the end of the run, which has {epochs * steps} steps ({epochs} "
            f"epochs of {steps}): choose lower ones"
        )
    if training.tensorflow_profiler and not Location(training.output).is_local:
        raise ValueError(
            f"training.tensorflow_profiler=true writes files, and training.output={training.output} is a URL: "
            "set a folder that all hosts mount, or training.tensorflow_profiler=false"
        )


def _check_cache_is_default(dataset: str, reader: ReaderConfig) -> None:
    for key in ("cache_folder", "cache_limit_gib"):
        value = getattr(reader, key)
        if value != reader.default(key):
            raise ValueError(
                f"reader.{key}={value} has no effect: {dataset} is local and not compressed, and is read "
                "without a cache"
            )


def _check_reader(dataset: str, reader: ReaderConfig, manifest: Manifest, *, workers: int, copies: int) -> None:
    if reader.name != "petastorm":
        return
    require("reader.name=petastorm", ["petastorm"])
    row_groups = sum(len(shard.row_groups) for shard in manifest.splits[TRAINING_SPLIT].shards)
    if row_groups < copies:
        raise ValueError(
            f"Petastorm's reader gives each worker whole row groups, and {dataset} has {row_groups} for "
            f"{workers} workers: set reader.name=groundswell, or prepare with a lower "
            "prepare.row_group_mib"
        )


def _check_model_input(dataset: str, input_config: InputConfig, model: ModelConfig, manifest: Manifest) -> None:
    """Check that the images fit the model's first layers; errors name the settings."""
    groups = used_groups(manifest.groups, input_config.bands)
    side = min(full_size(groups))
    if side < model.least_side:
        raise ValueError(
            f"model.name={model.name} needs images of at least {model.least_side} pixels on each side, "
            f"and those of {dataset} have {side}: choose another model.name"
        )
    _check_augmentation(dataset, input_config.augmentation, groups)
    upsampling, sizes = input_config.upsampling, {group.shape[:2] for group in groups}
    if upsampling != input_config.default("upsampling") and len(sizes) == 1:
        ((height, width),) = sizes
        raise ValueError(
            f"input.upsampling={upsampling} has no effect: all images of {dataset} that the network sees "
            f"have {height} x {width} pixels"
        )
    for group in groups:
        bands = group.shape[2]
        statistics = manifest.statistics.get(group.name)
        values = (*statistics.mean, *statistics.std) if statistics is not None else ()
        if len(values) != 2 * bands or not all(map(math.isfinite, values)):
            raise ValueError(
                f"{dataset} has no finite mean and standard deviation for each of the {bands} bands of "
                f"group {group.name!r}: prepare the dataset again"
            )


def _check_augmentation(dataset: str, augmentation: AugmentationConfig, groups: Sequence[ImageGroup]) -> None:
    for group in groups:
        height, width, _ = group.shape
        if augmentation.turns and height != width:
            raise ValueError(
                f"input.augmentation={augmentation.name} turns images by 90 degrees, and group {group.name!r} of "
                f"{dataset} has {height} x {width} pixels, no square: choose another input.augmentation"
            )
    if isinstance(augmentation, PadCropConfig):
        sizes = {group.name: group.shape[:2] for group in groups}
        for key, pixels in (("padding", augmentation.padding), ("cutout", augmentation.cutout)):
            try:
                shift_units(sizes, pixels, key)
            except ValueError as error:
                raise ValueError(f"input.augmentation.{key}={pixels} does not fit {dataset}: {error}") from None
