"""`groundswell schedule` as a user meets it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.shell import cli
from tests.patience import patient

SMOKE = ["schedule", "--config", "smoke"]
Table = Callable[..., dict[int, tuple[Any, Any, str]]]


@pytest.fixture
def table(capsys: pytest.CaptureFixture[str]) -> Table:
    """Step, epoch, rate and text of each line, for 320 images and some settings."""

    def read(*settings: str) -> dict[int, tuple[Any, Any, str]]:
        assert cli.execute([*SMOKE, "--images", "320", *(text for each in settings for text in ("--set", each))]) == 0
        first, _, *lines = capsys.readouterr().out.splitlines()
        # 320 images, 8 a step: 40 steps an epoch, 2 epochs; the peak is 8 * 8 / 256.
        assert settings or first == "peak 0.25, global batch 8, 320 images, 40 steps an epoch, 2 epochs, 80 steps"
        rows = [line.split(maxsplit=3) for line in lines]
        return {int(row[0].replace(",", "")): (float(row[1]), float(row[2]), "".join(row[3:])) for row in rows}

    return read


def test_the_table_has_the_first_and_last_step_and_every_place(table: Table) -> None:
    rows = table()
    expected = {
        0: (0.0, 0.25 / 40, "first step"),
        8: (0.2, pytest.approx(0.25 * 9 / 40), ""),
        39: (0.97, 0.25, ""),
        40: (1.0, 0.025, "schedule.warmup, schedule.decay.milestones[0]"),
        79: (1.98, 0.025, "last step"),
    }
    assert ({step: rows[step] for step in expected}, list(rows)) == (expected, sorted(rows))


def test_settings_change_it(table: Table) -> None:
    rows = table("schedule.decay={name: cosine, end_rate: 0.01}", "training.epochs=4")
    assert (rows[80], rows[159][2]) == ((2.0, 0.25, "schedule.warmup"), "last step")
    assert 0.01 < rows[159][1] < 0.0101


def test_the_table_says_where_images_grow(table: Table) -> None:
    parts = "input.resolution_schedule=[{until: {fraction: 0.2}, scale: 0.5}, {until: {steps: 85}, scale: 0.75}]"
    rows = table(parts, "training.epochs=4")
    assert {step: rows[step][2] for step in (0, 40, 120, 80)} == {
        0: "first step, images scaled by 0.5",
        40: "images scaled by 0.75",
        120: "full images",
        80: "schedule.warmup, schedule.decay.milestones[0]",
    }


def test_images_are_those_of_the_dataset(small_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute([*SMOKE, "--set", f"dataset.path={small_dataset}"]) == 0
    assert "32 images, 4 steps an epoch, 2 epochs, 8 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "datasets/smoke is not a finished dataset whose training images could be counted: give --images N"),
        (["--images", "7"], "7 images are fewer than one global batch of 8"),
        (["--images", "many"], "--images: should be a whole number above 0, got 'many'"),
        (["--images", "320", "--plot", "rate.pdf"], "--plot: should end in .png, got 'rate.pdf'"),
        (["--images", "320", "--plot", "nowhere/rate.png"], "--plot: there is no folder 'nowhere'"),
        (["--images", "320", "--set", "training.seed=3"], "--set training.seed has no effect: schedule reads"),
        (
            ["--images", "320", "--set", "schedule.warmup={steps: 100}"],
            "schedule.warmup is at step 100, beyond the end of the run (80 steps)",
        ),
        (
            ["--images", "320", "--set", "input.resolution_schedule=[{until: {fraction: 1.0}, scale: 0.5}]"],
            "input.resolution_schedule[0].until is after the beginning of the last of 2 epochs",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, folder: Path, error_line: Callable[..., str]
) -> None:
    assert message in error_line(*SMOKE, *arguments)
    assert list(folder.iterdir()) == []


_ALONE = """
import sys
from jobs.shell import cli
assert cli.execute(sys.argv[1:]) == 0
heavy = sorted({"tensorflow", "keras", "pyspark", "mlflow", "horovod", "matplotlib.pyplot"} & set(sys.modules))
assert not heavy, heavy
"""


def test_the_plot_is_drawn_without_tensorflow_or_spark(tmp_path: Path) -> None:
    plot = tmp_path / "rate.png"
    command = [sys.executable, "-c", _ALONE, *SMOKE, "--images", "100000", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr
    assert (done.stdout.splitlines()[-1], plot.read_bytes().startswith(b"\x89PNG")) == (f"plot {plot}", True)
