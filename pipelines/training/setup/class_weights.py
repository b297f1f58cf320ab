"""The weights of the classes in the training loss; this module imports no TensorFlow because the driver uses it too."""

import difflib
from collections.abc import Mapping
from typing import Literal

from pipelines.dataset.format.manifest import Manifest
from pipelines.sample import TRAINING_SPLIT

ClassWeights = Literal["balanced"] | Mapping[str, float] | None


def class_weights(setting: ClassWeights, manifest: Manifest) -> list[float] | None:
    """Return `training.class_weights` as one weight per class, in the dataset's order; None for equal weights.

        balanced, single label:  samples / (classes * samples of the class)
        balanced, multi label:   samples without the class / samples with it, the weight of a positive answer

    The counts are those of the training split. Classes without samples are not counted and have the weight 1, like
    classes that a mapping does not name.

    Raises:
        ValueError: The mapping names a class that the dataset does not have. Or all samples have a class, so that its
            balanced multi-label weight would be 0.

    Source: `compute_class_weight("balanced")` of scikit-learn (King, Zeng 2001); for several labels the ratio that
    PyTorch's documentation of `BCEWithLogitsLoss` names for `pos_weight`.
    """
    if setting is None:
        return None
    if not isinstance(setting, str):
        _check_names(setting, manifest)
        return [float(setting.get(name, 1.0)) for name in manifest.class_names]
    split = manifest.splits[TRAINING_SPLIT]
    rows, counts = split.rows, split.class_counts
    if manifest.task == "single_label":
        present = sum(count > 0 for count in counts)
        return [rows / (present * count) if count else 1.0 for count in counts]
    for name, count in zip(manifest.class_names, counts, strict=True):
        if count == rows:
            raise ValueError(
                f"training.class_weights=balanced would give {name!r}, which all {rows} training samples have, the "
                "weight 0: set training.class_weights to a mapping of class names to weights"
            )
    return [(rows - count) / count if count else 1.0 for count in counts]


def _check_names(setting: Mapping[str, float], manifest: Manifest) -> None:
    for name in setting:
        if name not in manifest.class_names:
            close = difflib.get_close_matches(name, manifest.class_names, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else f"; expected one of {', '.join(manifest.class_names)}"
            raise ValueError(f"training.class_weights names {name!r}, and the dataset has no such class{hint}")
