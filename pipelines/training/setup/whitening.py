"""The filters of a whitening convolution, computed from training images that rank 0 reads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from conf.sections.dataset import ReaderConfig
from models.networks.whitening import whiten
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.sample import TRAINING_SPLIT
from pipelines.training.setup.bands import seen_bands, used_groups
from pipelines.training.setup.input import reader_settings

_SAMPLES = 4096
"""The maximum number of training images whose patches are used."""
_VALUES, _VALUES_AT_ONCE = 3 * 2**22, 3 * 2**18
"""The maximum of pixels times bands that are read in total, and in one batch. A single image may have more."""


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
    groups = used_groups(manifest.groups, bands)
    pixels = max(group.shape[0] * group.shape[1] for group in groups)
    values = pixels * len(seen_bands(manifest.groups, bands))
    split = SplitReader(dataset, TRAINING_SPLIT, reader_settings(reader))
    rows = np.arange(min(len(split), _SAMPLES, max(1, _VALUES // values)), dtype=np.int64)
    whiten(model, _batches(split, rows, max(1, _VALUES_AT_ONCE // values)))
    return f"the first convolution whitens patches by {len(rows):,} training images"


def _batches(reader: SplitReader, rows: NDArray[np.int64], size: int) -> Iterator[Mapping[str, NDArray[Any]]]:
    for first in range(0, len(rows), size):
        yield reader.gather(rows[first : first + size]).images
