"""The weights of an earlier training: the driver checks their source, and rank 0 loads them."""

import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.sections.training import WarmStartConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.machine.json_text import parse_json
from pipelines.storage.folder import Location
from pipelines.tracking.models.models import load_model, model_metadata
from pipelines.training.checkpoint.state import read_arrays
from pipelines.training.setup.bands import seen_bands

if TYPE_CHECKING:
    import keras

    from models.networks.warm_start import TrainedWeights

_CHECKPOINT, _KERAS_FILE = ".npz", ".keras"
_BANDS, _CLASSES = "dataset.bands", "dataset.class_names"


def dataset_names(manifest: Manifest, bands: Sequence[str] | None) -> dict[str, str]:
    """Return the settings of a checkpoint that name its network's inputs and outputs.

    Args:
        manifest: Manifest of the dataset.
        bands: `input.bands`.
    """
    return {
        _BANDS: json.dumps(seen_bands(manifest.groups, bands)),
        _CLASSES: json.dumps(list(manifest.class_names)),
    }


def check_source(config: WarmStartConfig) -> None:
    """Check on the driver that the source exists and can be read; this function imports no TensorFlow.

    Raises:
        ValueError: The model or file does not exist, is damaged or has another type.
        RuntimeError: The tracking server cannot be reached.
    """
    if config.source is None:
        return
    if config.is_logged:
        model_metadata(config.source)
        return
    path = Path(config.source)
    if path.suffix not in (_CHECKPOINT, _KERAS_FILE):
        raise ValueError(
            f"warm_start.source={config.source}: expected runs:/..., models:/..., a checkpoint ({_CHECKPOINT}) or a "
            f"Keras file ({_KERAS_FILE})"
        )
    if not path.is_file():
        raise ValueError(f"warm_start.source={config.source}: there is no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"warm_start.source={config.source}: the file is damaged, or no {path.suffix} file")


def read_weights(config: WarmStartConfig) -> "TrainedWeights":
    """Read all weights of the source, and its bands and classes if they are known.

    Raises:
        ValueError: The source cannot be read.
        RuntimeError: The tracking server cannot be reached.
    """
    import keras

    from models.networks.warm_start import TrainedWeights

    assert config.source is not None
    if config.is_logged:
        model, metadata = load_model(config.source)
        return TrainedWeights(_arrays_of(model), metadata.bands, metadata.class_names or None)
    if config.source.endswith(_KERAS_FILE):
        return TrainedWeights(_arrays_of(keras.saving.load_model(config.source, compile=False)), None, None)
    state, arrays = read_arrays(Location(config.source))
    # Keras appends a number to the name of a process's second and later optimizers.
    optimizer = re.compile(rf"{re.escape(state.settings['optimizer.name'])}(_\d+)?\.")
    named = [(name.partition(":")[2], value) for name, value in arrays.items()]
    found = _by_name((name, value) for name, value in named if not optimizer.match(name))
    return TrainedWeights(found, *(parse_json(state.settings[key]) for key in (_BANDS, _CLASSES)))


def begin_with(
    model: "keras.Model", config: WarmStartConfig, manifest: Manifest, bands: Sequence[str] | None
) -> list[str]:
    """Set the model's weights to those of the source; return lines that say which weights were used.

    Args:
        model: The model.
        config: The section with the source.
        manifest: Manifest of the dataset.
        bands: `input.bands`.

    Raises:
        ValueError: The source cannot be read, or has nothing in common with the network.
    """
    from models.networks.warm_start import take_weights

    try:
        taken = take_weights(
            model,
            read_weights(config),
            bands=seen_bands(manifest.groups, bands),
            class_names=manifest.class_names,
        )
    except ValueError as error:
        raise ValueError(f"warm_start.source={config.source}: {error}") from error
    return [f"warm start from {config.source}", *taken.lines()]


def _arrays_of(model: "keras.Model") -> dict[str, Any]:
    from models.networks.warm_start import name_of

    return _by_name((name_of(variable), np.asarray(variable)) for variable in model.variables)


def _by_name(arrays: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the arrays by name.

    Raises:
        ValueError: Several arrays have the same name, as may happen with two nested networks.
    """
    found: dict[str, Any] = {}
    for name, value in arrays:
        if name in found:
            raise ValueError(f"several of its variables have the name {name}, and are distinguished by names here")
        found[name] = value
    return found
