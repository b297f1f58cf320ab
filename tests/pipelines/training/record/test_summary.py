from typing import Any

import pytest

from conf.load import load
from conf.sections.training import SelectionConfig
from pipelines.dataset.format.manifest import Manifest
from pipelines.training.record.summary import Computer, compared_metric, summary_of
from tests.pipelines.training.manifests import rgb_manifest

MANIFEST = rgb_manifest(splits={"train": (17, 17), "validation": (17, 17)}, archive="eurosat_rgb")
COMPUTER = Computer(2, 1000, 10**9, 5e10, 1e11)


def epoch(number: int, top_1: float, rate: float) -> dict[str, float]:
    return {
        "train/loss": 1.0 / number,
        "val/top_1": top_1,
        "speed/images_per_second": rate,
        "time/input_wait_fraction": 0.1 * number,
        "time/elapsed_seconds": 4.0 * number,
        "time/samples_seen": 32.0 * number,
        "exchange/payload_bytes_total": 4000.0 * number,
    }


HISTORY = [epoch(1, 0.5, 8.0), epoch(2, 0.8, 16.0), epoch(3, 0.7, 32.0)]


def figures(
    history: list[dict[str, float]], *settings: str, manifest: Manifest = MANIFEST, computer: Computer = COMPUTER
) -> dict[str, float]:
    """The summary, by names without their group."""
    found = summary_of(history, load("smoke", settings), manifest, computer)
    return {name.removeprefix("summary/"): value for name, value in found.items()}


def test_the_figures_by_hand() -> None:
    # 34 samples are 4 steps of 8 samples, 96 in three epochs.
    assert figures(HISTORY, "tracking.target=0.7") == pytest.approx(
        {
            "best_value": 0.8,
            "best_epoch": 2,
            "epochs_to_target": 2,
            "samples_to_target": 64,
            "seconds_to_target": 8,
            "seconds": 12,
            "images_per_second": 8,
            "images_per_second_steady": 16,
            "images_per_second_per_rank": 8,
            "seconds_per_step": 0.5,
            "input_wait_fraction": 0.2,
            "payload_bytes": 12_000,
            "wire_bytes": 24_000,  # each of two ranks sends what it has once
            "parameters": 1000,
            "flops_per_image": 3e9,
            "matmul_flops_per_second": 5e10,
            "share_of_matmul": 0.48,  # 8 images per second on each rank
            "share_of_peak": 0.24,
        }
    )


def test_an_epoch_that_was_resumed_after_its_last_step_has_no_speed() -> None:
    found = figures([HISTORY[0], epoch(2, 0.8, 0.0), HISTORY[2]])
    assert (found["images_per_second_steady"], found["seconds_per_step"]) == (20, 0.4)
    alone = figures([epoch(1, 0.5, 0.0)])
    assert alone["images_per_second"] == 8
    assert not alone.keys() & {
        "images_per_second_steady", "images_per_second_per_rank", "seconds_per_step", "share_of_matmul",
    }  # fmt: skip


def test_each_epoch_counts_with_its_own_number_of_workers() -> None:
    # Four workers in the first epoch, then one is left, and three: 2, 16 and 10.67 images/s of each.
    found = figures([{**row, "time/workers": workers} for row, workers in zip(HISTORY, (4.0, 1.0, 3.0), strict=True)])
    assert found == found | {
        "images_per_second_per_rank": pytest.approx(32 / 3),
        # 4000 bytes an epoch and rank; alone, a rank sends nothing.
        "wire_bytes": 2 * 3 * 4000 + 0 + 2 * 2 * 4000,
        "share_of_peak": pytest.approx(32 / 3 * 3e9 / 1e11),
    }


def test_what_a_processor_reaches_is_that_of_full_images() -> None:
    history = [{**row, "train/image_height": height} for row, height in zip(HISTORY, (16.0, 32.0, 32.0), strict=True)]
    found = figures(history)
    # 8 and 16 images per second.
    assert (found["images_per_second_per_rank"], found["share_of_matmul"]) == pytest.approx((8, 12 * 3e9 / 5e10))
    # It ended before the first epoch with full images.
    assert not [name for name in figures(history[:1]) if "share" in name]


def test_a_target_that_was_not_reached_and_a_peak_that_is_not_known_are_left_out() -> None:
    found = figures(HISTORY, "tracking.target=0.9", computer=Computer(1, 1000, 10**9, 5e10, None))
    assert not [name for name in found if "target" in name or "peak" in name]
    assert found["wire_bytes"] == 0


def test_of_a_loss_lower_is_better() -> None:
    history = [{**row, "val/loss": loss} for row, loss in zip(HISTORY, (0.9, 0.5, 0.6), strict=True)]
    found = figures(history, "training.selection.metric=val/loss", "tracking.target=0.5")
    assert (found["best_value"], found["best_epoch"], found["epochs_to_target"]) == (0.5, 2, 2)


@pytest.mark.parametrize(
    ("changes", "metric"),
    [
        ({}, "val/top_1"),
        ({"task": "multi_label"}, "val/f1_micro"),
        ({"splits": {"train": MANIFEST.splits["train"]}}, "train/loss"),
    ],
)
def test_the_metric_that_is_compared(changes: dict[str, Any], metric: str) -> None:
    assert compared_metric(SelectionConfig(), MANIFEST.model_copy(update=changes)) == metric
