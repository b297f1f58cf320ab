"""Losses from logits, one value per sample; the caller chooses the samples of the mean."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops

from models.imported import errors_of_function, import_function

Loss = Callable[[Any, Any], Any]
"""Function from targets and logits, tensors of Keras's backend, to one loss per sample."""


def classification_loss(
    task: str, *, label_smoothing: float = 0.0, class_weights: Sequence[float] | None = None
) -> Loss:
    """Return `loss(targets, logits)`, both `(batch, classes)`, with values `(batch,)` in float32.

    "multi_label": mean over classes of -(w t log sigmoid(z) + (1 - t) log(1 - sigmoid(z))).
    "single_label": -sum over classes of w t log softmax(z), with targets whose sum is 1.

    Args:
        task: "multi_label" or "single_label".
        label_smoothing: Part a of the targets, in [0, 1), that is spread over the possible answers before the loss is
            computed: t = (1 - a) t + a / 2 for each class of "multi_label", and t = (1 - a) t + a / classes for
            "single_label".
        class_weights: Weight w of each class, positive; None for 1. The mean over a batch is not divided by the weights
            of its samples.

    Raises:
        ValueError: an unknown task, a part out of range, or a weight that is not positive.

    Source: Szegedy et al. 2016, "Rethinking the Inception architecture", section 7; for several labels the same with
    two answers per class, as in Keras's `BinaryCrossentropy`.
    """
    if task not in _LOSSES:
        raise ValueError(f"task must be one of {sorted(_LOSSES)}, got {task!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    if class_weights is not None and not all(weight > 0 for weight in class_weights):
        raise ValueError(f"class_weights must be positive, got {list(class_weights)}")
    formula = _LOSSES[task] if class_weights is None else functools.partial(_WEIGHTED[task], list(class_weights))

    def loss(targets: Any, logits: Any) -> Any:
        targets, logits = ops.cast(targets, "float32"), ops.cast(logits, "float32")
        if label_smoothing > 0:
            answers = 2 if task == "multi_label" else targets.shape[-1]
            targets = (1.0 - label_smoothing) * targets + label_smoothing / answers
        return formula(targets, logits)

    return loss


def imported_loss(path: str, settings: Mapping[str, Any], *, setting: str) -> Loss:
    """Return an imported loss, in the form of `classification_loss`.

        function(targets, logits, **settings) -> losses

    `targets` and `logits` are float32 `(batch, classes)`, the losses `(batch,)`. Many functions of `keras.losses` fit,
    such as `binary_focal_crossentropy` with `from_logits: true`. The function becomes part of the training's graph.

    Args:
        path: Import path of the function, `package.module:function`.
        settings: Further arguments of the function.
        setting: Key of the configuration that holds the path, for messages.

    Raises:
        ValueError: The function is not found; when called, an exception of the function, or a result that is not one
            value per sample.
    """
    function = import_function(path, setting)

    def loss(targets: Any, logits: Any) -> Any:
        targets, logits = ops.cast(targets, "float32"), ops.cast(logits, "float32")
        with errors_of_function(f"{setting}={path}"):
            losses = ops.cast(function(targets, logits, **settings), "float32")
        if len(losses.shape) != 1:
            raise ValueError(
                f"{setting}={path}: the function returned losses of the shape {tuple(losses.shape)}, expected one per "
                "sample, (batch,), and not their mean"
            )
        return losses

    return loss


def _multi_label(targets: Any, logits: Any) -> Any:
    return ops.mean(ops.binary_crossentropy(targets, logits, from_logits=True), axis=-1)


def _weighted_multi_label(weights: list[float], targets: Any, logits: Any) -> Any:
    weighted = ops.convert_to_tensor(weights, "float32") * targets * ops.softplus(-logits)
    return ops.mean(weighted + (1.0 - targets) * ops.softplus(logits), axis=-1)


def _weighted_single_label(weights: list[float], targets: Any, logits: Any) -> Any:
    return -ops.sum(ops.convert_to_tensor(weights, "float32") * targets * ops.log_softmax(logits), axis=-1)


_WEIGHTED = {"multi_label": _weighted_multi_label, "single_label": _weighted_single_label}
_LOSSES: dict[str, Loss] = {
    "multi_label": _multi_label,
    "single_label": functools.partial(ops.categorical_crossentropy, from_logits=True),
}
