"""Test-time augmentation: probabilities of an image, averaged over symmetries of the square."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipelines.sample import ImageGroup
from pipelines.scoring.predict.predictor import Predict

Symmetries = Literal["mirror", "flips", "dihedral"]
COUNTS: dict[Symmetries, int] = {"mirror": 2, "flips": 4, "dihedral": 8}
"""Number of images that each group makes of one; the first is the image itself."""
_COLUMNS, _ROWS, _TRANSPOSED = 1, 2, 4


def averaged(predict: Predict, symmetries: Symmetries | None) -> Predict:
    """Return a function that averages the predictions for an image and its transformed copies.

        p(x) = mean over the symmetries s of predict(s(x))

    Element e of a group of symmetries transposes the image if e & 4. Then it reverses the rows if e & 2, and the
    columns if e & 1, as in `models.layers.augmentation`. "mirror" has the first two, "flips" four, "dihedral" all
    eight. All image groups of a sample are transformed alike.

    Args:
        predict: Function that predicts probabilities.
        symmetries: Name of the group; None: `predict` itself is returned.

    Source: Krizhevsky et al. 2012, section 4.1, for the mean over mirrored images.
    """
    if symmetries is None:
        return predict

    def predict_all(images: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32]:
        found = [
            predict({name: _moved(group, element) for name, group in images.items()})
            for element in range(COUNTS[symmetries])
        ]
        return np.asarray(np.mean(found, axis=0, dtype=np.float32))

    return predict_all


def check_symmetries(symmetries: Symmetries | None, inputs: Sequence[ImageGroup]) -> None:
    """Check that a model's images can be transposed, if the symmetries do this.

    Raises:
        ValueError: The images are not square.
    """
    for group in inputs:
        height, width, _ = group.shape
        if symmetries == "dihedral" and height != width:
            raise ValueError(
                f"evaluate.test_time_augmentation=dihedral turns images by 90 degrees, and group {group.name!r} has "
                f"{height} x {width} pixels, no square: choose mirror or flips"
            )


def _moved(images: NDArray[Any], element: int) -> NDArray[Any]:
    """Apply one element to each of the images `(batch, height, width, bands)`."""
    images = images.swapaxes(1, 2) if element & _TRANSPOSED else images
    images = images[:, ::-1] if element & _ROWS else images
    return np.ascontiguousarray(images[:, :, ::-1] if element & _COLUMNS else images)
