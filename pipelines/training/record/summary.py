"""The summary of a finished run, with the usual figures of a paper's table, from the history of its epochs."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from conf.schema import RunConfig
from conf.sections.training import SelectionConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT
from pipelines.tracking.metrics import IMAGE_HEIGHT, is_lower_better
from pipelines.training.checkpoint.selection import History, best_of
from pipelines.training.setup.bands import used_groups
from pipelines.training.setup.resolution import full_size

_PASSES = 3
"""A training step is a forward pass (1 part of operations) and a backward pass (2 parts)."""


@dataclass(frozen=True)
class Computer:
    """The properties of model and device."""

    ranks: int
    """Number of ranks at the end of the training; used for epochs that do not record theirs."""
    parameters: int
    """Number of trainable parameters."""
    forward_flops: int
    """Floating-point operations of the forward pass of one image."""
    matmul_flops_per_second: float
    """Rate of a matrix product, measured on rank 0."""
    nominal_flops_per_second: float | None
    """Peak of rank 0's cores or GPU; None if unknown."""


def compared_metric(selection: SelectionConfig, manifest: Manifest) -> str:
    """Return the metric that epochs are compared by: that of `training.selection`, or the usual one of the task."""
    if selection.metric is not None:
        return selection.metric
    if VALIDATION_SPLIT not in manifest.splits:
        return "train/loss"
    return "val/f1_micro" if manifest.task == "multi_label" else "val/top_1"


def summary_of(history: History, config: RunConfig, manifest: Manifest, computer: Computer) -> dict[str, float]:
    """Return the summary by names in the group `summary`; unknown values are left out.

    Args:
        history: Metrics of each epoch.
        config: The whole configuration.
        manifest: Manifest of the dataset.
        computer: Properties of model and device.
    """
    metric = compared_metric(config.training.selection, manifest)
    last, rows = history[-1], manifest.splits[TRAINING_SPLIT].rows
    values: dict[str, float] = {}
    best = best_of(history, SelectionConfig(metric=metric))
    if best is not None:
        values |= {"best_value": best.value, "best_epoch": best.epoch}
    reached = _first_reaching(history, metric, config.tracking.target)
    if reached is not None:
        values |= {
            "epochs_to_target": reached + 1,
            "samples_to_target": history[reached]["time/samples_seen"],
            "seconds_to_target": history[reached]["time/elapsed_seconds"],
        }
    # An epoch that was resumed after its last step has no speed.
    timed = [row for row in history if row["speed/images_per_second"] > 0]
    if timed:
        steady = statistics.median(row["speed/images_per_second"] for row in timed)
        values |= {
            "images_per_second_steady": steady,
            "images_per_second_per_rank": _speed_of_a_rank(timed, computer),
            "seconds_per_step": config.global_batch_size / steady,
        }
    seconds = last["time/elapsed_seconds"]
    values |= {
        "seconds": seconds,
        "images_per_second": len(history) * (rows // config.global_batch_size) * config.global_batch_size / seconds,
        "payload_bytes": last["exchange/payload_bytes_total"],
        "wire_bytes": _wire_bytes(history, computer),
        "input_wait_fraction": statistics.fmean(row["time/input_wait_fraction"] for row in history),
        "parameters": computer.parameters,
        "flops_per_image": _PASSES * computer.forward_flops,
        "matmul_flops_per_second": computer.matmul_flops_per_second,
    }
    # Smaller images of a resolution schedule need fewer operations.
    height = full_size(used_groups(manifest.groups, config.input.bands))[0]
    full = [row for row in timed if row.get(IMAGE_HEIGHT, height) == height]
    if full:
        computed = values["flops_per_image"] * _speed_of_a_rank(full, computer)
        values["share_of_matmul"] = computed / computer.matmul_flops_per_second
        if computer.nominal_flops_per_second:
            values["share_of_peak"] = computed / computer.nominal_flops_per_second
    return {f"summary/{name}": float(value) for name, value in values.items()}


def _speed_of_a_rank(history: History, computer: Computer) -> float:
    return statistics.median(row["speed/images_per_second"] / _workers(row, computer) for row in history)


def _workers(row: Mapping[str, float], computer: Computer) -> float:
    return row.get("time/workers", computer.ranks)


def _wire_bytes(history: History, computer: Computer) -> float:
    """Return the bytes that all ranks sent: in an allreduce of n bytes each of N ranks sends 2 n (N - 1) / N."""
    sent = before = 0.0
    for row in history:
        sent += 2 * (_workers(row, computer) - 1) * (row["exchange/payload_bytes_total"] - before)
        before = row["exchange/payload_bytes_total"]
    return sent


def _first_reaching(history: History, metric: str, target: float | None) -> int | None:
    """Return the index of the first epoch whose metric reaches the target."""
    if target is None:
        return None
    sign = -1 if is_lower_better(metric) else 1
    return next((at for at, row in enumerate(history) if metric in row and sign * (row[metric] - target) >= 0), None)
