"""The facts about a model that scoring needs, and a check that images fit it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray

from pipelines.sample import ImageGroup, Task
from pipelines.tracking.store.served import ServedModel

DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class ModelDescription:
    """Inputs and outputs of a model."""

    uri: str
    model_id: str
    version: str
    """Version of the model, written beside each prediction."""
    task: Task
    class_names: tuple[str, ...]
    inputs: tuple[ImageGroup, ...]
    thresholds: tuple[float, ...] | None = None
    """Least probability of each predicted class, tuned on validation; None if it was not tuned."""

    def thresholds_or(self, configured: float | None) -> tuple[float, ...]:
        """Return one threshold per class: the configured one, or else the model's, or else the default."""
        if configured is None and self.thresholds is not None:
            return self.thresholds
        return (DEFAULT_THRESHOLD if configured is None else configured,) * len(self.class_names)


def describe(model: ServedModel) -> ModelDescription:
    """Read the description of a logged model.

    Raises:
        ValueError: The description is incomplete; the message names what is missing.
    """
    task = model.metadata.task
    if task not in get_args(Task):
        raise ValueError(
            f"{model.uri}: its metadata has the task {task!r}, expected one of {', '.join(get_args(Task))}"
        )
    inputs = []
    for name, (shape, dtype) in model.inputs.items():
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"{model.uri}: its input {name!r} has the shape {shape}, expected (height, width, bands)")
        inputs.append(ImageGroup(name, shape, dtype, model.metadata.groups[name]))
    return ModelDescription(
        model.uri,
        model.model_id,
        model.version,
        cast(Task, task),
        model.metadata.class_names,
        tuple(inputs),
        model.thresholds,
    )


def check_fits(
    model: ModelDescription, *, where: str, task: Task, class_names: Sequence[str], groups: Sequence[ImageGroup]
) -> None:
    """Make sure that a model can score the samples of a dataset or archive; further image groups are allowed.

    Args:
        model: Description of the model.
        where: Name of the dataset or archive, for messages.
        task: Task of the dataset or archive.
        class_names: Its classes in their order.
        groups: Its image groups.

    Raises:
        ValueError: Task, classes, image groups or bands differ from the model's. The message names the first
            difference.
    """
    if task != model.task:
        raise ValueError(f"{model.uri} is a {model.task} model, and {where} is {task}")
    if len(class_names) == len(model.class_names) and tuple(class_names) != model.class_names:
        number, own, other = next(
            (number, own, other)
            for number, (own, other) in enumerate(zip(model.class_names, class_names, strict=True), 1)
            if own != other
        )
        raise ValueError(f"class {number} of {model.uri} is {own!r}, and that of {where} is {other!r}")
    if len(class_names) != len(model.class_names):
        raise ValueError(
            f"{model.uri} knows {len(model.class_names)} classes ({model.class_names[0]}, ...), {where} has "
            f"{len(class_names)} ({class_names[0]}, ...)"
        )
    check_inputs_fit(model, where=where, groups=groups)


def check_inputs_fit(model: ModelDescription, *, where: str, groups: Sequence[ImageGroup]) -> None:
    """Make sure that a model can take the images of a dataset or archive; the arguments are those of `check_fits`.

    Raises:
        ValueError: Image groups or bands differ from the model's; the message names the first difference.
    """
    known = {group.name: group for group in groups}
    for wanted in model.inputs:
        group = known.get(wanted.name)
        if group is None:
            raise ValueError(
                f"{model.uri} takes the image group {wanted.name!r}, {where} has {', '.join(known) or 'none'}"
            )
        if (group.shape, group.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"{model.uri} takes {wanted.name!r} as {wanted.dtype} {wanted.shape}, {where} has {group.dtype} "
                f"{group.shape}"
            )
        if group.bands != wanted.bands:
            raise ValueError(
                f"{model.uri} takes the bands {', '.join(wanted.bands)} in {wanted.name!r}, {where} has "
                f"{', '.join(group.bands)}"
            )


def predicted_classes(
    probabilities: NDArray[np.float32], task: Task, thresholds: float | Sequence[float] | NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return which classes are predicted, `(rows, classes)`: those that reach their threshold, or the likeliest."""
    if task == "multi_label":
        return np.asarray(probabilities >= np.asarray(thresholds))
    return np.asarray(np.argmax(probabilities, axis=1)[:, np.newaxis] == np.arange(probabilities.shape[1]))
