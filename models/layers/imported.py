"""An augmentation from outside this project, by import path."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import keras

from models.imported import errors_of_function, import_function
from models.layers.augmentation import SeededAugmentation
from models.layers.backend import ON_TENSORFLOW

if TYPE_CHECKING or ON_TENSORFLOW:
    import tensorflow as tf

_SETTING = "input.augmentation.path"


class ImportedAugmentation(SeededAugmentation):
    """Calls an imported function on the images of every training batch.

        function(images, seeds, **settings) -> images

    `images` has for each image group a tensor `(batch, height, width, bands)` of the stored dtype. `seeds` has one
    int32 per sample, whose bits are as good as random. The result has the same groups, shapes and dtypes. A function
    that draws only from the seeds is the same on any number of ranks and after a resume. The function becomes part of a
    TensorFlow graph, on the accelerator.

    Args:
        path: Import path of the function, `package.module:function`.
        settings: Further arguments of the function.

    Raises:
        ValueError: The function is not found; when called in training, missing seeds, an exception of the function, or
            images of another shape or dtype.
    """

    def __init__(self, path: str, settings: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(f"{_SETTING}={path}", **kwargs)
        self.import_path, self.settings = path, dict(settings)
        self._function = import_function(path, _SETTING)

    def augmented(self, images: dict[str, Any], seeds: "tf.Tensor") -> dict[str, Any]:
        """Return the result of the function."""
        images = {name: tf.convert_to_tensor(group) for name, group in images.items()}
        with errors_of_function(self._subject):
            found = self._function(images, seeds, **self.settings)
        expected = _described(images)
        if not isinstance(found, Mapping) or _described(found) != expected:
            got = _described(found) if isinstance(found, Mapping) else f"a {type(found).__name__}"
            raise ValueError(f"{self._subject}: the function returned {got}, expected {expected}")
        return dict(found)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Refuse to make the layer: it would import whatever a model's file names.

        Raises:
            ValueError: Always. A logged model has no augmentation, and a training makes its own.
        """
        raise ValueError(f"{cls.__name__} is made from {_SETTING}, and never from a file")


def _described(images: Mapping[str, Any]) -> dict[str, str]:
    """Return shape and dtype of each group, without the number of samples."""
    return {
        name: f"{keras.backend.standardize_dtype(images[name].dtype)} {tuple(images[name].shape[1:])}"
        if hasattr(images[name], "shape")
        else type(images[name]).__name__
        for name in sorted(images)
    }
