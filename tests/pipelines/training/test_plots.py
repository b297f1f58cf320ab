import io

import pytest
from matplotlib.figure import Figure

from pipelines.training.plots import learning_curves, learning_rate_curve, per_class_bars

ROWS = [
    {"class": "Arable land", "support": 50, "precision": 0.5, "recall": 0.5, "f1": 0.5, "average_precision": 0.6},
    {"class": "A" * 80, "support": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0, "average_precision": float("nan")},
]


@pytest.mark.parametrize(
    "figure",
    [
        learning_curves([{"train/loss": 0.5}]),
        learning_curves([{"train/loss": 1.0, "val/loss": 0.9, "val/f1_micro": 0.1, "val/f1_macro": 0.1}] * 3),
        learning_curves([{"train/loss": 1.0, "val/loss": 0.9, "val_ema/loss": 0.8}] * 3),
        learning_rate_curve([0.1, 0.2, 0.1]),
        per_class_bars(ROWS, "validation"),
    ],
)
def test_figures_render(figure: Figure) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    assert stream.getvalue().startswith(b"\x89PNG")


def test_the_most_frequent_class_is_on_top() -> None:
    labels = [label.get_text() for label in per_class_bars(ROWS, "x").axes[0].get_yticklabels()]
    assert labels[-1] == "Arable land (50)"
    assert labels[0].endswith("… (0)")
