"""Draws the learning rates of all published recipes in conf/ into one picture, `results/schedules.png`.

Nothing is trained: the number of training images of each archive is the published one. `schedules.json` beside the
picture has some rates of each curve, which a test compares with the recipes. `--smoke` draws into a temporary folder.
"""

import json
import tempfile
from pathlib import Path

from conf.load import load, shipped_names
from conf.schema import RunConfig
from pipelines.training.record.plots import schedule_curve
from pipelines.training.setup.rates import boundary_steps, make_schedule, peak_learning_rate
from tests.benchmarks.parts.command import is_smoke

RESULTS = Path(__file__).parent / "results"
IMAGES = {"image_folder": 1_281_167, "bigearthnet_v1": 269_695, "bigearthnet_v2": 237_871}
"""Training images of ImageNet and of the official splits of BigEarthNet."""
NOT_PUBLISHED = ("demo", "smoke")
POINTS = 600
RECORDED = 10
"""Equal parts of a run at whose ends the rates are recorded."""


def curve(config: RunConfig) -> list[tuple[float, float]]:
    """Epoch and rate at equal distances, and on both sides of every place of the schedule."""
    assert config.archive is not None
    steps, epochs = IMAGES[config.archive.kind] // config.global_batch_size, config.training.epochs
    total, places = steps * epochs, boundary_steps(config.schedule, epochs, steps)
    rate = make_schedule(config, steps)
    shown = {part * (total - 1) // POINTS for part in range(POINTS + 1)}
    shown |= {step + side for _, step in places for side in (-1, 0) if step + side < total}
    return [(step / steps, rate(step)) for step in sorted(shown)]


def recipes() -> dict[str, RunConfig]:
    """All recipes by name."""
    return {name: load(name) for name in shipped_names() if name not in NOT_PUBLISHED}


def recorded(config: RunConfig) -> list[float]:
    """Rates at equal distances over the run, the first and the last step included, to five digits."""
    assert config.archive is not None
    steps = IMAGES[config.archive.kind] // config.global_batch_size
    rate, last = make_schedule(config, steps), steps * config.training.epochs - 1
    return [float(f"{rate(part * last // RECORDED):.5g}") for part in range(RECORDED + 1)]


def draw(folder: Path) -> None:
    """Draw all recipes."""
    named = sorted(recipes().items(), key=lambda item: (item[0].rpartition("_")[0], item[1].global_batch_size))
    figure = schedule_curve({f"{name}, batch {config.global_batch_size:,}": curve(config) for name, config in named})
    figure.savefig(folder / "schedules.png", dpi=120)
    lines = (f"  {json.dumps(name)}: {json.dumps(recorded(config))}" for name, config in named)
    (folder / "schedules.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    peaks = {name: peak_learning_rate(config.optimizer, config.global_batch_size) for name, config in named}
    print(json.dumps({"peaks": {name: round(peak, 6) for name, peak in peaks.items()}}))


def main() -> None:
    """Draw once."""
    smoke = is_smoke(__doc__, "draw into a temporary folder")
    with tempfile.TemporaryDirectory() as temporary:
        draw(Path(temporary) if smoke else RESULTS)


if __name__ == "__main__":
    main()
