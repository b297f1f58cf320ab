"""The names of all metrics that a run can have, each with its meaning; a writer accepts no other name."""

from collections.abc import Iterable, Mapping, Sequence

from conf.sections.modes import MODES

VALIDATION_GROUP = "val"
"""Group of the model's scores on the validation split."""
AVERAGED_GROUP = "val_ema"
"""Group of the scores of the averaged weights."""

IMAGE_HEIGHT = "train/image_height"
"""Height in pixels of the network's training images."""

SYSTEM_GROUP = "system"
"""Group of MLflow's samples of every rank's machine, under MLflow's names."""

_LATER_STEPS = ", without the first step of each process and size of images, which compiles"
_STEP = {
    "train/step_loss": "loss of rank 0's batch",
    "train/learning_rate": "learning rate of the optimizer",
    "exchange/payload_bytes": "bytes of an allreduce with the same cost as the exchange of the gradients, and of the "
    "sums of batch norm over ranks",
    "exchange/compression_ratio": "bytes of the gradients in float32, divided by those of their exchange",
    "exchange/residual_norm": "Euclidean norm of what the codec of rank 0 has left to send",
    "time/encode_seconds": "time in which rank 0 encodes gradients, measured on CPUs" + _LATER_STEPS,
    "time/collective_seconds": "time in which rank 0 sends, receives and waits for other ranks, measured on CPUs"
    + _LATER_STEPS,
    "time/decode_seconds": "time in which rank 0 decodes what it has received, measured on CPUs" + _LATER_STEPS,
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
    "time/epoch": "number of epochs done",
    "time/samples_seen": "training samples of all optimizer steps so far",
    "time/elapsed_seconds": "seconds since training began, without compiling and without lost steps that were repeated",
    "time/compile_seconds": "seconds so far that the first step of each process and size of images took beyond a usual "
    "one",
    "time/step_seconds": "seconds of a step, mean over the ranks, without the first step, which compiles",
    "time/step_input_seconds": "of these, waiting for the next batch",
    "time/step_compute_seconds": "of these, forward and backward pass and all that has no other name",
    "time/step_encode_seconds": "of these, encoding gradients, measured on CPUs",
    "time/step_wire_seconds": "of these, sending and receiving, measured on CPUs",
    "time/step_decode_seconds": "of these, decoding what was received, measured on CPUs",
    "time/step_optimizer_seconds": "of these, the update of the weights, measured on CPUs",
    "time/step_waiting_seconds": "of these, waiting for the slowest rank, measured on CPUs",
    "time/slowest_rank": "the rank for which the others wait",
    "time/workers": "number of workers, which lost executors make smaller",
    "exchange/payload_bytes_total": "payload_bytes of all steps so far",
}
_SUMMARY = {
    "summary/best_value": "best value of the metric of training.selection, or of val/f1_micro or val/top_1",
    "summary/best_epoch": "number of its epoch",
    "summary/seconds": "time/elapsed_seconds of the last epoch: training and validation, without compiling",
    "summary/seconds_per_step": "global batch divided by images_per_second_steady",
    "summary/images_per_second": "training samples divided by summary/seconds",
    "summary/images_per_second_steady": "median of speed/images_per_second over the epochs",
    "summary/images_per_second_per_rank": "median of speed/images_per_second divided by time/workers of the epoch",
    "summary/input_wait_fraction": "mean of time/input_wait_fraction over the epochs",
    "summary/payload_bytes": "payload of all steps of one rank",
    "summary/wire_bytes": "bytes that all ranks send in all steps, by a formula and not measured: 2 (N - 1) / N of the "
    "payload each",
    "summary/parameters": "trainable numbers of the model",
    "summary/flops_per_image": "operations of a training step for one image, 3 times those of the forward pass",
    "summary/matmul_flops_per_second": "operations per second of a matrix product, measured on rank 0",
    "summary/share_of_matmul": "part of that rate that training reaches on each rank, with full images",
    # These are not in every run.
    "summary/share_of_peak": "part of the nominal peak of the rank's cores or GPU that training reaches, if known",
    "summary/epochs_to_target": "epochs until the metric reached tracking.target",
    "summary/samples_to_target": "training samples until then",
    "summary/seconds_to_target": "seconds until then",
}
_HEADLINES = {
    "epoch/images_per_second": "speed/images_per_second",
    "epoch/learning_rate": "train/learning_rate",
    "epoch/payload_bytes": "exchange/payload_bytes_total",
    "epoch/train_loss": "train/loss",
    "epoch/val_f1_micro": "val/f1_micro",
    "epoch/val_loss": "val/loss",
    "epoch/val_top_1": "val/top_1",
}
"""Second names of the most important metrics. MLflow's page sorts charts by name, and these come first."""
_SCORES = {
    "f1_micro": "F1 of all decisions together (multi-label)",
    "f1_macro": "mean F1 of all classes, 0 for an absent one",
    "mean_average_precision": "mean average precision of the classes that have positives",
    "top_1": "fraction of samples whose likeliest class is right (single-label)",
    "top_5": "fraction of samples whose class is among the 5 likeliest (single-label, above 5 classes)",
}
_EVALUATION = {
    "loss": "mean cross-entropy of all samples, whatever training.loss is",
    **_SCORES,
    "expected_calibration_error": "mean gap between the probability of a decision and the part that is right (ECE)",
    "f1_micro_tuned": "F1 of all decisions with the thresholds tuned on validation (multi-label)",
    "f1_macro_tuned": "mean F1 of all classes with the thresholds tuned on validation (multi-label)",
}
_VALIDATION = {"loss": "mean loss over all validation samples", **_SCORES}


def described() -> dict[str, str]:
    """Return the meaning of each metric and when it is written, in one line without a full stop."""
    return {
        **{name: f"each step: {line}" for name, line in _STEP.items()},
        **{name: f"each step of find-rate: {line}" for name, line in _RANGE_TEST.items()},
        **{name: f"each epoch: {line}" for name, line in _EPOCH.items()},
        **{name: f"each epoch: {source} at its end, for the first charts" for name, source in _HEADLINES.items()},
        IMAGE_HEIGHT: "each epoch, with input.resolution_schedule: height in pixels of the images that the network was "
        "trained on",
        "train/skipped_steps": "each epoch, with training.precision=float16: steps so far that no rank took, as "
        "gradients overflowed on one of them",
        **{
            name: f"each epoch, with training.mode={mode}: {line}"
            for mode, declaration in MODES.items()
            for name, line in declaration.metrics.items()
        },
        **{f"{VALIDATION_GROUP}/{name}": f"each epoch: {line}" for name, line in _VALIDATION.items()},
        **{
            f"{AVERAGED_GROUP}/{name}": f"each epoch, with training.ema: of the averaged weights, {line}"
            for name, line in _VALIDATION.items()
        },
        **{name: f"end: {line}" for name, line in _SUMMARY.items()},
        **{f"test/{name}": f"evaluate: {line}" for name, line in _EVALUATION.items()},
        **{f"test_ema/{name}": f"evaluate, of model_ema: {line}" for name, line in _EVALUATION.items()},
    }


def headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the most important metrics under the names that MLflow's page shows first.

    Args:
        metrics: Metrics of the epoch and of its last step.
    """
    return {name: metrics[source] for name, source in _HEADLINES.items() if source in metrics}


def validation_metrics(task: str, classes: int, *, averaged: bool, own: Sequence[str] = ()) -> list[str]:
    """Return the names of a training's validation metrics.

    Args:
        task: "multi_label" or "single_label".
        classes: Number of classes.
        averaged: Whether averaged weights are also validated.
        own: Names of the user's own metrics.
    """
    of_task = ["f1_micro"] if task == "multi_label" else ["top_1", *(["top_5"] if classes > 5 else [])]
    names = ["loss", *of_task, "f1_macro", "mean_average_precision", *own]
    groups = [VALIDATION_GROUP, *([AVERAGED_GROUP] if averaged else [])]
    return [f"{group}/{name}" for group in groups for name in names]


def is_lower_better(name: str) -> bool:
    """Return whether lower values of a metric are better: its name ends in `loss`, also for the user's own metrics."""
    return name.endswith("loss")


def unlisted(names: Iterable[str], own: Sequence[str] = ()) -> list[str]:
    """Return the names that `described` does not have; scores of `evaluate` may also be of another split than `test`.

    Args:
        names: Groups and names, such as "val/f1_micro".
        own: Names of the user's own metrics in validation and evaluation, and of the figures of the user's own
            training mode.
    """
    known, rests = {*described(), *own}, {*_EVALUATION, *own}

    def is_listed(name: str) -> bool:
        group, _, rest = name.partition("/")
        return name in known or rest in rests or (group == SYSTEM_GROUP and "/" in rest)

    return [name for name in names if not is_listed(name)]
