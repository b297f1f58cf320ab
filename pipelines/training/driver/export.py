"""The model of a checkpoint, logged to its run without training, after an outage or a crash has prevented it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from conf.load import resolve
from conf.schema import RunConfig
from conf.sections.dataset import ReaderConfig
from conf.sections.training import SelectionConfig
from models.networks.model import inputs_of, with_probabilities
from pipelines.dataset.format.manifest import Manifest, read_manifest
from pipelines.dataset.format.order import steps_per_epoch
from pipelines.dataset.read.reader import SplitReader
from pipelines.sample import TRAINING_SPLIT
from pipelines.storage.folder import Location
from pipelines.tracking.journal.local_run import CONFIG_FILE
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP
from pipelines.tracking.models.model_metadata import ModelMetadata
from pipelines.tracking.models.models import AVERAGED_MODEL, MODEL, log_model
from pipelines.tracking.models.registry import Promotion
from pipelines.tracking.store.store import TrackedRun
from pipelines.training.checkpoint.files import DamagedError, checkpoint_path, list_checkpoints
from pipelines.training.checkpoint.selection import best_step
from pipelines.training.checkpoint.state import TrainingState, assign_arrays, read_checkpoint, readable
from pipelines.training.driver.output import CHECKPOINTS
from pipelines.training.ranks.results import Thresholds
from pipelines.training.setup.description import metadata_of_model
from pipelines.training.setup.input import reader_settings
from pipelines.training.setup.recipe import freeze_layers, make_model
from pipelines.training.step.weight_average import WeightAverage

_log = logging.getLogger(__name__)


def log_model_of(
    folder: Path, run: TrackedRun, checkpoint: Location | None = None, checkpoints: Location | None = None
) -> str:
    """Make the model of a checkpoint and the model of its averaged weights, and log both; return the model's URI.

    Args:
        folder: The run's folder.
        run: The run that gets the model.
        checkpoint: The checkpoint. None: that of the best epoch if `training.selection` asks for it, else the newest.
        checkpoints: Folder of the run's checkpoints; None: the one in `folder`.

    Raises:
        FileNotFoundError: The folder has no checkpoint or no recorded configuration.
        ValueError: The checkpoint is of another training, or all are damaged.
        TrackingError: The store did not receive the model.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG_FILE}, as every run's folder has: train again without training.resume_run"
        )
    config, manifest = resolve(str(folder / CONFIG_FILE)), read_manifest(folder)
    steps = steps_per_epoch(manifest.splits[TRAINING_SPLIT].rows, config.global_batch_size)
    path, state, arrays = _read(
        checkpoints or Location(str(folder / CHECKPOINTS)), checkpoint, config.training.selection, steps
    )
    # Keras numbers unnamed layers per process. The checkpoint has the names of the first model in a process.
    keras.backend.clear_session()
    model = make_model(config, manifest)
    freeze_layers(config.warm_start, model)  # frozen layers have no average
    average = WeightAverage(model, config.training.ema) if config.training.ema is not None else None
    _assign(path, arrays, model.variables, average.variables if average else [])
    return log_trained(run, model, manifest, config, step=state.step, average=average, thresholds=state.thresholds)


def log_trained(
    run: TrackedRun,
    model: keras.Model,
    manifest: Manifest,
    config: RunConfig,
    *,
    step: int,
    average: WeightAverage | None,
    thresholds: Thresholds,
) -> str:
    """Log the model of the averaged weights, if there is one, then the trained model; return the latter's URI.

    Args:
        run: The run that gets the models.
        model: The trained model.
        manifest: Manifest of its dataset.
        config: The whole configuration.
        step: Number of optimizer steps after which the model's weights were taken.
        average: The average of its weights; None: there is none.
        thresholds: Thresholds tuned on the validation split.

    Raises:
        TrackingError: The store did not receive a model.
    """
    metadata = metadata_of_model(manifest, config.input.bands, config.model)
    task, tracking = manifest.task, config.tracking

    def tuned(group: str) -> ModelMetadata:
        return replace(metadata, thresholds=tuple(thresholds[group])) if group in thresholds else metadata

    if average is not None:
        with average.in_model():
            averaged = with_probabilities(model, task)
        log_model(
            run, averaged, replace(tuned(AVERAGED_GROUP), ema=average.decay), None, step=step, name=AVERAGED_MODEL
        )
    served = with_probabilities(model, task)
    return log_model(
        run,
        served,
        tuned(VALIDATION_GROUP),
        tracking.registered_model,
        step=step,
        name=MODEL,
        promotion=Promotion(tracking.promote_metric, tracking.promote_margin),
        example=_example(config.dataset.path, config.reader, served, manifest),
    )


def _example(
    dataset: str, reader: ReaderConfig, model: keras.Model, manifest: Manifest
) -> dict[str, NDArray[np.generic]] | None:
    """Return the first training sample as the model takes it; None if the run's dataset can no longer be read."""
    try:
        if read_manifest(dataset).fingerprint != manifest.fingerprint:  # others see the example beside the model
            raise ValueError(f"{dataset} is another dataset than that of the run")
        split = SplitReader(dataset, TRAINING_SPLIT, reader_settings(reader))
        return inputs_of(model, split.gather(np.zeros(1, np.int64)).images)
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("the model gets no input example: %s", error)
        return None


def _read(
    checkpoints: Location, checkpoint: Location | None, selection: SelectionConfig, steps: int
) -> tuple[Location, TrainingState, dict[str, Any]]:
    if checkpoint is not None:
        return _whole(checkpoint)
    for path, (state, arrays) in readable(checkpoints, read_checkpoint):
        best = best_step(state.history, selection, steps) if selection.metric and selection.model == "best" else None
        if best is not None and best != state.step:
            return _whole(checkpoint_path(checkpoints, best))
        return path, state, arrays
    raise FileNotFoundError(
        f"{checkpoints} has {len(list_checkpoints(checkpoints))} checkpoints, and none of them can be read"
    )


def _whole(path: Location) -> tuple[Location, TrainingState, dict[str, Any]]:
    try:
        return path, *read_checkpoint(path)
    except DamagedError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _assign(path: Location, arrays: dict[str, Any], weights: list[Any], averages: list[Any]) -> None:
    """Set the model's variables, which come first in a checkpoint, and the averages, which are found by name."""
    names = sorted(arrays)
    assign_arrays(path, {name: arrays[name] for name in names[: len(weights)]}, weights)
    by_name = {name.partition(":")[2]: arrays[name] for name in names[len(weights) :]}
    for variable in averages:
        name = variable.path.replace("/", ".")
        if name not in by_name:
            raise ValueError(f"{path} has no {name}: it was not written with training.ema")
        variable.assign(by_name[name])
