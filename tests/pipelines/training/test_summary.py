import pytest

from conf.load import load
from pipelines.dataset.manifest import Manifest, Shard, Split
from pipelines.sample import ImageGroup
from pipelines.training.summary import Computer, compared_metric, summary_of

SPLIT = Split(shards=(Shard(file="train/a.parquet", row_groups=(34,), size=1),), class_counts=(17, 17))
VALIDATION = Split(shards=(Shard(file="validation/a.parquet", row_groups=(34,), size=1),), class_counts=(17, 17))
MANIFEST = Manifest(
    archive="eurosat_rgb",
    task="single_label",
    class_names=("water", "land"),
    groups=(ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue")),),
    splits={"train": SPLIT, "validation": VALIDATION},
    statistics={},
    settings={},
    source_fingerprint="abc",
)
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


def test_the_figures_by_hand() -> None:
    # 34 samples are 4 steps of 8 samples, 96 in three epochs.
    found = summary_of(HISTORY, load("smoke", ["tracking.target=0.7"]), MANIFEST, COMPUTER)
    assert found == pytest.approx(
        {
            "summary/best_value": 0.8,
            "summary/best_epoch": 2,
            "summary/epochs_to_target": 2,
            "summary/samples_to_target": 64,
            "summary/seconds_to_target": 8,
            "summary/seconds": 12,
            "summary/images_per_second": 8,
            "summary/images_per_second_steady": 16,
            "summary/images_per_second_per_rank": 8,
            "summary/seconds_per_step": 0.5,
            "summary/input_wait_fraction": 0.2,
            "summary/payload_bytes": 12_000,
            "summary/wire_bytes": 24_000,  # each of two ranks sends what it has once
            "summary/parameters": 1000,
            "summary/flops_per_image": 3e9,
            "summary/matmul_flops_per_second": 5e10,
            "summary/share_of_matmul": 0.48,  # 8 images per second on each rank
            "summary/share_of_peak": 0.24,
        }
    )


def test_an_epoch_that_was_resumed_after_its_last_step_has_no_speed() -> None:
    found = summary_of([HISTORY[0], epoch(2, 0.8, 0.0), HISTORY[2]], load("smoke"), MANIFEST, COMPUTER)
    assert (found["summary/images_per_second_steady"], found["summary/seconds_per_step"]) == (20, 0.4)
    alone = summary_of([epoch(1, 0.5, 0.0)], load("smoke"), MANIFEST, COMPUTER)
    assert alone["summary/images_per_second"] == 8
    figures = ("images_per_second_steady", "images_per_second_per_rank", "seconds_per_step", "share_of_matmul")
    assert not {f"summary/{name}" for name in figures} & alone.keys()


def test_each_epoch_counts_with_its_own_number_of_workers() -> None:
    # Four workers in the first epoch, then one is left, and three: 2, 16 and 10.67 images/s of each.
    history = [{**row, "time/workers": workers} for row, workers in zip(HISTORY, (4.0, 1.0, 3.0), strict=True)]
    found = summary_of(history, load("smoke"), MANIFEST, COMPUTER)
    assert found["summary/images_per_second_per_rank"] == pytest.approx(32 / 3)
    # 4000 bytes an epoch and rank; alone, a rank sends nothing.
    assert found["summary/wire_bytes"] == 2 * 3 * 4000 + 0 + 2 * 2 * 4000
    assert found["summary/share_of_peak"] == pytest.approx(32 / 3 * 3e9 / 1e11)


def test_what_a_processor_reaches_is_that_of_full_images() -> None:
    heights = (16.0, 32.0, 32.0)
    history = [{**row, "train/image_height": height} for row, height in zip(HISTORY, heights, strict=True)]
    found = summary_of(history, load("smoke"), MANIFEST, COMPUTER)
    assert found["summary/images_per_second_per_rank"] == 8
    assert found["summary/share_of_matmul"] == pytest.approx(12 * 3e9 / 5e10)  # 8 and 16 images per second
    # It ended before the first epoch with full images.
    found = summary_of(history[:1], load("smoke"), MANIFEST, COMPUTER)
    assert not [name for name in found if "share" in name]


def test_a_target_that_was_not_reached_and_a_peak_that_is_not_known_are_left_out() -> None:
    computer = Computer(1, 1000, 10**9, 5e10, None)
    found = summary_of(HISTORY, load("smoke", ["tracking.target=0.9"]), MANIFEST, computer)
    assert not [name for name in found if "target" in name or "peak" in name]
    assert found["summary/wire_bytes"] == 0


def test_of_a_loss_lower_is_better() -> None:
    config = load("smoke", ["training.selection.metric=val/loss", "tracking.target=0.5"])
    history = [{**row, "val/loss": loss} for row, loss in zip(HISTORY, (0.9, 0.5, 0.6), strict=True)]
    found = summary_of(history, config, MANIFEST, COMPUTER)
    assert (found["summary/best_value"], found["summary/best_epoch"], found["summary/epochs_to_target"]) == (0.5, 2, 2)


def test_the_metric_that_is_compared() -> None:
    config = load("smoke")
    assert compared_metric(config, MANIFEST) == "val/top_1"
    assert compared_metric(config, MANIFEST.model_copy(update={"task": "multi_label"})) == "val/f1_micro"
    assert compared_metric(config, MANIFEST.model_copy(update={"splits": {"train": SPLIT}})) == "train/loss"


def test_epochs_of_an_earlier_version_lack_some_figures() -> None:
    old = [{"train/loss": 1.0, "speed/images_per_second": 8.0, "time/input_wait_fraction": 0.0}]
    found = summary_of(old, load("smoke"), MANIFEST, COMPUTER)
    assert "summary/best_value" not in found
    assert "summary/seconds" not in found
    assert found["summary/images_per_second_steady"] == 8.0
