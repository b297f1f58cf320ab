"""The training images by which a whitening convolution gets its filters, read by rank 0."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from conf.schema import RunConfig
from models.networks.whitening import whiten
from pipelines.dataset.manifest import Manifest
from pipelines.dataset.reader import SplitReader
from pipelines.sample import TRAINING_SPLIT
from pipelines.training.bands import used_groups
from pipelines.training.input import reader_settings

_SAMPLES, _PIXELS = 4096, 2**22
_PIXELS_AT_ONCE = 2**18


def begin_whitened(model: keras.Model, config: RunConfig, manifest: Manifest) -> str:
    """Set the filters of the model's whitening convolution by samples from all over the training split.

    Args:
        model: The model, which has such a layer.
        config: The whole configuration.
        manifest: The dataset.

    Returns:
        What was done, as a sentence.

    Raises:
        ValueError: damaged rows, or pixels that are not finite.
    """
    groups = used_groups(manifest.groups, config.input.bands)
    pixels = max(group.shape[0] * group.shape[1] for group in groups)
    reader = SplitReader(config.dataset.path, TRAINING_SPLIT, reader_settings(config.reader))
    samples = min(len(reader), _SAMPLES, max(1, _PIXELS // pixels))
    rows = np.linspace(0, len(reader) - 1, samples).astype(np.int64)
    try:
        whiten(model, _batches(reader, rows, max(1, _PIXELS_AT_ONCE // pixels)))
    except ValueError as error:
        raise ValueError(f"{config.dataset.path}: {error}") from error
    return f"the first convolution whitens patches by {samples:,} training images"


def _batches(reader: SplitReader, rows: NDArray[np.int64], size: int) -> Iterator[Mapping[str, NDArray[Any]]]:
    for first in range(0, len(rows), size):
        yield reader.gather(rows[first : first + size]).images
