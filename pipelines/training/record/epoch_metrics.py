"""The metrics of an epoch for the history, the checkpoints and the tracked run."""

from collections.abc import Mapping, Sequence

from models.layers.grids import Size
from pipelines.tracking.metrics import IMAGE_HEIGHT
from pipelines.training.ranks.results import Evaluation
from pipelines.training.record.phases import StepPhases
from pipelines.training.step.loop import EpochResult
from pipelines.training.step.loss_scale import LossScale


def epoch_metrics(
    trained: EpochResult,
    phases: StepPhases,
    evaluations: Mapping[str, Evaluation],
    loss_scale: LossScale | None,
    totals: Mapping[str, float],
    *,
    size: Size | None,
    of_mode: Mapping[str, float],
) -> dict[str, float]:
    """Return the history's entry of one epoch; an epoch that was resumed after its last step has no step times.

    Args:
        trained: The epoch.
        phases: Times of the parts of its steps.
        evaluations: Evaluations by metric group.
        loss_scale: Scale of the loss; None if there is none.
        totals: Metrics that count from the start of training.
        size: Size to which its images were resized; None: they were not resized.
        of_mode: Metrics that only the training mode has.
    """
    metrics = {
        "train/loss": trained.loss,
        "speed/images_per_second": trained.images_per_second,
        "time/input_wait_fraction": trained.input_wait_fraction,
        "time/workers": float(len(phases.seconds)),
        **totals,
    }
    if trained.measured_steps:
        metrics |= {
            "time/step_seconds": trained.measured_seconds / trained.measured_steps,
            **{f"time/step_{name}_seconds": seconds for name, seconds in phases.mean.items()},
            "time/slowest_rank": float(phases.slowest_rank),
        }
    if size is not None:
        metrics[IMAGE_HEIGHT] = float(size[0])
    if loss_scale is not None:
        metrics["train/skipped_steps"] = float(loss_scale.skipped)
    metrics |= of_mode
    for group, evaluation in evaluations.items():
        metrics |= {f"{group}/{name}": value for name, value in evaluation.metrics.items()}
    return metrics


def totals_after(
    history: Sequence[Mapping[str, float]],
    *,
    steps: int,
    global_batch_size: int,
    payload_bytes: float,
    seconds: float,
    compile_seconds: float,
) -> dict[str, float]:
    """Return the metrics of an epoch that count from the start of training, over all attempts.

    Args:
        history: Metrics of the previous epochs.
        steps: Number of steps per epoch.
        global_batch_size: Samples per step over all ranks.
        payload_bytes: Payload of its steps.
        seconds: Seconds since the end of the previous epoch, without repeated steps.
        compile_seconds: Seconds of this time in which the training step was compiled.
    """
    before = history[-1] if history else {}
    epochs = len(history) + 1
    return {
        "time/epoch": float(epochs),
        "time/samples_seen": float(epochs * steps * global_batch_size),
        "time/elapsed_seconds": before.get("time/elapsed_seconds", 0.0) + seconds - compile_seconds,
        "time/compile_seconds": before.get("time/compile_seconds", 0.0) + compile_seconds,
        "exchange/payload_bytes_total": before.get("exchange/payload_bytes_total", 0.0) + payload_bytes,
    }
