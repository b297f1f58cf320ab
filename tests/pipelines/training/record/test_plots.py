import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pipelines.training.finders.rates import RatePoint
from pipelines.training.record.phases import StepPhases, divide
from pipelines.training.record.plots import (
    learning_curves,
    learning_rate_curve,
    per_class_bars,
    range_test_curve,
    where_the_step_goes,
)

ROWS = [
    {"class": "Arable land", "support": 50, "precision": 0.5, "recall": 0.5, "f1": 0.5, "average_precision": 0.6},
    {"class": "A" * 80, "support": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0, "average_precision": float("nan")},
]
PHASES = divide(np.array([[0.5, 0.02, 0.05, 0.1, 0.05, 0.02, 0.27], [0.5, 0.02, 0.05, 0.15, 0.05, 0.02, 0.27]]))


def epochs(phases: StepPhases, count: int) -> list[dict[str, float]]:
    return [{f"time/step_{name}_seconds": seconds for name, seconds in phases.mean.items()}] * count


@pytest.mark.parametrize(
    "figure",
    [
        learning_curves([{"train/loss": 0.5}]),
        learning_curves([{"train/loss": 1.0, "val/loss": 0.9, "val/f1_micro": 0.1, "val/f1_macro": 0.1}] * 3),
        learning_curves([{"train/loss": 1.0, "val/loss": 0.9, "val_ema/loss": 0.8}] * 3),
        learning_rate_curve([0.1, 0.2, 0.1]),
        per_class_bars(ROWS, "validation"),
        where_the_step_goes(epochs(PHASES, 3), PHASES),
        where_the_step_goes([{"train/loss": 1.0}], PHASES),  # an epoch without steps
    ],
)
def test_figures_render(figure: Figure) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    assert stream.getvalue().startswith(b"\x89PNG")


def test_the_most_frequent_class_is_on_top() -> None:
    labels = [label.get_text() for label in per_class_bars(ROWS, "x").axes[0].get_yticklabels()]
    assert (labels[-1], labels[0][-5:]) == ("Arable land (50)", "… (0)")


def test_the_phases_of_a_step_are_stacked_by_epoch_and_by_rank() -> None:
    by_epoch, by_rank = where_the_step_goes(epochs(PHASES, 3), PHASES).axes
    assert {round(bar.get_y() + bar.get_height(), 6) for bar in by_rank.patches[-2:] if isinstance(bar, Rectangle)} == {
        500.0
    }, "all phases of a rank make up its step, in milliseconds"
    assert (len(by_epoch.patches), by_rank.get_title()) == (3 * 7, "last epoch (slowest: rank 0)")


@pytest.mark.parametrize("smoothed", [(2.3, 1.5, 0.9, 8.0), (-0.5, -0.55, -0.588, -0.2), (0.0, -0.2, -0.3), (1.0, 1.0)])
def test_a_range_test_shows_its_losses_below_zero_too(smoothed: tuple[float, ...]) -> None:
    points = [RatePoint(10.0 ** (step - 4), loss, loss) for step, loss in enumerate(smoothed)]
    (axis,) = range_test_curve(points, None).axes
    low, high = axis.get_ylim()
    assert low < min(smoothed) <= smoothed[0] < high, "the axis is the right way up"
