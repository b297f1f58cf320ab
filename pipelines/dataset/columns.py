"""Names and values of the plain columns of a dataset."""

import numpy as np
from numpy.typing import NDArray

ID_FIELD = "id"
LABEL_FIELD = "labels"
CHECKSUM_FIELD = "crc32c"


def label_vector(indices: list[int], class_count: int) -> NDArray[np.uint8]:
    """Multi-hot `(classes,)` uint8 vector of the given class indices."""
    vector = np.zeros(class_count, np.uint8)
    vector[indices] = 1
    return vector
