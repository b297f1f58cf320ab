"""The training images by which a whitening convolution gets its filters, read by rank 0."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from conf.schema import RunConfig
from models.networks.whitening import whiten
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.sample import TRAINING_SPLIT
from pipelines.training.setup.bands import seen_bands, used_groups
from pipelines.training.setup.input import reader_settings

_SAMPLES = 4096
"""Training images of which patches are taken, at most."""
_VALUES, _VALUES_AT_ONCE = 3 * 2**22, 3 * 2**18
"""Pixels times bands that are read for it, and of them those of one batch; one image may have more."""


def begin_whitened(model: keras.Model, config: RunConfig, manifest: Manifest) -> str:
    """Set the filters of the model's whitening convolution by the first rows of the training split.

    `prepare` has shuffled the split, so that these are a random part of it, in as few files as possible.

    Args:
        model: The model, which has such a layer.
        config: The whole configuration.
        manifest: The dataset.

    Returns:
        What was done, as a sentence.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: As `SplitReader`; ValueError for pixels that are not finite.
    """
    groups = used_groups(manifest.groups, config.input.bands)
    pixels = max(group.shape[0] * group.shape[1] for group in groups)
    values = pixels * len(seen_bands(manifest.groups, config.input.bands))
    reader = SplitReader(config.dataset.path, TRAINING_SPLIT, reader_settings(config.reader))
    rows = np.arange(min(len(reader), _SAMPLES, max(1, _VALUES // values)), dtype=np.int64)
    whiten(model, _batches(reader, rows, max(1, _VALUES_AT_ONCE // values)))
    return f"the first convolution whitens patches by {len(rows):,} training images"


def _batches(reader: SplitReader, rows: NDArray[np.int64], size: int) -> Iterator[Mapping[str, NDArray[Any]]]:
    for first in range(0, len(rows), size):
        yield reader.gather(rows[first : first + size]).images
