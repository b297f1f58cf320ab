"""The published recipes, at the points that their sources state."""

import math
from pathlib import Path

import pytest

from conf.load import load
from conf.schema import RunConfig
from models.schedules import Schedule
from pipelines.training.setup.rates import make_schedule, peak_learning_rate

CONF = Path(__file__).parents[2] / "conf"
IMAGENET, REBEN, BIGEARTHNET_V1 = 1_281_167, 237_871, 269_695


def of(name: str, images: int) -> tuple[Schedule, int, int]:
    """Schedule, steps per epoch and steps in all."""
    config = load(name)
    steps = images // config.global_batch_size
    return make_schedule(config, steps), steps, steps * config.training.epochs


def peak_of(config: RunConfig) -> float:
    return peak_learning_rate(config.optimizer, config.global_batch_size)


@pytest.mark.parametrize(
    ("batch", "rate", "warmup_epochs", "decay_steps", "weight_decay", "momentum", "epochs"),
    [
        (1_632, 7.4, 2, 27_476, 5e-5, 0.9, 37),
        (3_264, 10.5, 2, 14_523, 5e-5, 0.9, 37),
        (4_096, 10.0, 5, 13_137, 2e-4, 0.9, 42),
        (8_192, 17.0, 5, 6_095, 2e-4, 0.9, 44),
        (13_056, 12.8, 9, 4_710, 2.5e-5, 0.9, 46),
        (32_768, 21.2, 16, 2_267, 2.5e-5, 0.94, 57),
        (65_536, 24.699, 31, 1_133, 1e-4, 0.951807, 86),
    ],
)
def test_rows_of_mlperf(
    batch: int,
    rate: float,
    warmup_epochs: int,
    decay_steps: int,
    weight_decay: float,
    momentum: float,
    epochs: int,
) -> None:
    config = load(f"resnet50_lars_{batch}")
    training = config.training
    assert (config.global_batch_size, training.epochs, training.label_smoothing) == (batch, epochs, 0.1)
    published: dict[str, object] = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": False}
    published |= {"name": "lars", "trust_coefficient": 0.001, "epsilon": 0.0, "variant": "mlperf"}
    assert config.optimizer.model_dump().items() >= published.items()
    schedule, steps, total = of(f"resnet50_lars_{batch}", IMAGENET)
    warmup = warmup_epochs * steps
    middle = (warmup + total) // 2
    places, expected = (0, warmup - 1, warmup, middle, total - 1), [rate / warmup, rate, rate]
    expected += [1e-4 + (rate - 1e-4) * ((total - step) / (total - warmup)) ** 2 for step in (middle, total - 1)]
    assert list(map(schedule, places)) == pytest.approx(expected)
    assert schedule(warmup // 2 - 1) == pytest.approx(rate / 2, rel=0.03)
    assert schedule(middle) == pytest.approx(rate / 4, rel=0.01)
    assert schedule(total - 1) < 4e-4
    head = (CONF / f"resnet50_lars_{batch}.yaml").read_text().partition("\narchive:")[0]
    says = f"# Differs: the published decay has {decay_steps:,} steps, and the one here has {total - warmup:,}: it ends"
    assert (says in head) == (abs(decay_steps / (total - warmup) - 1) > 0.01)


def assert_falls(schedule: Schedule, steps: int, total: int, peak: float) -> None:
    """By ten at the beginning of epochs 30, 60 and 80, and nowhere else."""
    for number, epoch in enumerate((30, 60, 80), 1):
        before, after = schedule(epoch * steps - 1), schedule(epoch * steps)
        assert (before, after) == pytest.approx((peak * 10 ** (1 - number), peak / 10**number))
    assert schedule(total - 1) == pytest.approx(peak / 1000)


def test_goyal() -> None:
    config = load("goyal_resnet50")
    assert (config.global_batch_size, config.optimizer.roles()) == (
        8192,
        {"excluded": ["gain", "shift"], "unadapted": ["kernel", "bias", "gain", "shift"]},
    )
    schedule, steps, total = of("goyal_resnet50", IMAGENET)
    warmup = 5 * steps
    # From 0.1 to 3.2 by a constant amount.
    assert schedule(0) == pytest.approx(0.1 + 3.1 / warmup)
    assert schedule(warmup // 2 - 1) == pytest.approx(1.65, abs=0.01)
    assert schedule(warmup - 1) == pytest.approx(3.2)
    assert_falls(schedule, steps, total, 3.2)


def test_sedona() -> None:
    config, published = load("sedona_resnet50"), {"name": "lars", "nesterov": True, "trust_coefficient": 0.03}
    assert config.optimizer.model_dump().items() >= published.items()
    schedule, steps, total = of("sedona_resnet50", BIGEARTHNET_V1)
    assert (schedule(0), schedule(5 * steps - 1)) == pytest.approx((0.2 / (5 * steps), 0.2))
    assert_falls(schedule, steps, total, 0.2)
    assert peak_of(load("sedona_resnet50", ["launch.num_workers=128"])) == pytest.approx(3.2)  # 8,192


def test_reben() -> None:
    config = load("reben_resnet50")
    assert (config.optimizer.name, config.global_batch_size, config.input.bands) == (
        "adamw",
        512,
        ["B02", "B03", "B04", "B08", "B05", "B06", "B07", "B8A", "B11", "B12"],
    )
    network = {"name": "resnet", "depth": 50, "dropout": 0.15, "stochastic_depth": 0.15}
    assert config.model.model_dump().items() >= network.items()
    schedule, steps, total = of("reben_resnet50", REBEN)
    assert (steps, total) == (464, 46_400)
    # Step 23,700 is half-way between 1,000 and 46,400.
    places = {0: 1e-6, 499: 5e-4, 999: 1e-3, 1000: 1e-3, 23_700: 5e-4}
    places[total - 1] = 1e-3 * (1 - math.cos(math.pi / 45_400)) / 2
    assert {step: schedule(step) for step in places} == pytest.approx(places, rel=1e-6)


def test_the_rate_of_bigearthnet_v2_is_that_of_the_law_of_mlperf() -> None:
    # The rates at 1,632 and 3,264 times the root of 256 over the batch.
    assert [
        peak_of(load(f"resnet50_lars_{batch}")) * math.sqrt(256 / batch) for batch in (1_632, 3_264)
    ] == pytest.approx([2.9, 2.9], rel=0.02)
    config = load("bigearthnet_v2_resnet50")
    assert (config.global_batch_size, peak_of(config)) == pytest.approx((256, 2.9))
    larger = load("bigearthnet_v2_resnet50", ["training.global_batch_size=4096"])
    assert peak_of(larger) == pytest.approx(11.6)  # beside 10, which MLPerf's row of 4,096 has
