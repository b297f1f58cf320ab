"""The names of all metrics that a run can have, each with what it means; a writer takes no other name."""

from collections.abc import Sequence

VALIDATION_GROUP = "val"
"""Group of the scores of the model on the validation split."""
AVERAGED_GROUP = "val_ema"
"""Group of the scores of its averaged weights."""

_STEP = {
    "train/step_loss": "loss of rank 0's batch",
    "train/learning_rate": "learning rate of the optimizer",
    "exchange/payload_bytes": "bytes of an allreduce with the same cost as the exchange of the gradients",
    "exchange/compression_ratio": "bytes of the gradients in float32, divided by payload_bytes",
    "exchange/residual_norm": "Euclidean norm of what the codec of rank 0 has left to send",
    "time/encode_seconds": "time in which rank 0 encodes gradients, measured on CPUs",
    "time/collective_seconds": "time in which rank 0 sends, receives and waits for other ranks, measured on CPUs",
    "time/decode_seconds": "time in which rank 0 decodes what it has received, measured on CPUs",
}
_RANGE_TEST = {
    "range_test/loss": "mean loss of the global batch",
    "range_test/smoothed_loss": "the same, smoothed",
    "range_test/learning_rate": "learning rate of the step",
}
_EPOCH = {
    "train/loss": "mean loss over all training samples, as it is minimised: of mixed or smoothed targets, weighted",
    "speed/images_per_second": "training samples per second of all ranks, without the first step, which compiles",
    "time/input_wait_fraction": "part of the training time in which rank 0 waits for its next batch",
}
_OF_HALF_FLOATS = {"train/skipped_steps": "steps so far that no rank took, as gradients overflowed on one of them"}
_SCORES = {
    "f1_micro": "F1 of all decisions together (multi-label)",
    "f1_macro": "mean F1 of all classes, 0 for an absent one",
    "mean_average_precision": "mean average precision of the classes that have positives",
    "top_1": "fraction of samples whose likeliest class is right (single-label)",
    "top_5": "fraction of samples whose class is among the 5 likeliest (single-label, above 5 classes)",
}
_VALIDATION = {"loss": "mean loss over all validation samples", **_SCORES}


def described() -> dict[str, str]:
    """Return what each metric means, in a line without a full stop, and when it is written."""
    return {
        **{name: f"each step: {line}" for name, line in _STEP.items()},
        **{name: f"each step of find-rate: {line}" for name, line in _RANGE_TEST.items()},
        **{name: f"each epoch: {line}" for name, line in _EPOCH.items()},
        **{name: f"each epoch, with training.precision=float16: {line}" for name, line in _OF_HALF_FLOATS.items()},
        **{f"{VALIDATION_GROUP}/{name}": f"each epoch: {line}" for name, line in _VALIDATION.items()},
        **{
            f"{AVERAGED_GROUP}/{name}": f"each epoch, with training.ema: of the averaged weights, {line}"
            for name, line in _VALIDATION.items()
        },
        **{f"test/{name}": f"evaluate: {line}" for name, line in _SCORES.items()},
    }


def validation_metrics(task: str, classes: int, *, averaged: bool, own: Sequence[str] = ()) -> list[str]:
    """Return the names of the metrics of validation that a training has.

    Args:
        task: "multi_label" or "single_label".
        classes: Number of classes.
        averaged: Whether averaged weights are validated too.
        own: Names of the user's own metrics.
    """
    of_task = ["f1_micro"] if task == "multi_label" else ["top_1", *(["top_5"] if classes > 5 else [])]
    names = ["loss", *of_task, "f1_macro", "mean_average_precision", *own]
    groups = [VALIDATION_GROUP, *([AVERAGED_GROUP] if averaged else [])]
    return [f"{group}/{name}" for group in groups for name in names]


def is_listed(name: str, own: Sequence[str] = ()) -> bool:
    """Whether `described` has a name; `evaluate` may write the scores of another split than `test` too.

    Args:
        name: Group and name, such as "val/f1_micro".
        own: Names of the user's own metrics, which validation and evaluation have beside the others.
    """
    return name in described() or name.partition("/")[2] in (*_SCORES, *own)
