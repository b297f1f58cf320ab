import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.metrics import average_precision_score, precision_recall_curve

from pipelines.training.ranks.predictions import Predictions, confusion, precision_recall
from pipelines.training.ranks.results import Evaluation, thresholds_of
from pipelines.training.record.plots import confusion_picture, contact_sheet, precision_recall_curves

MULTI = Predictions(
    np.array([[0.9, 0.2, 0.7], [0.4, 0.6, 0.1], [0.5, 0.1, 0.2]]),
    np.array([[1, 1, 0], [1, 0, 0], [1, 0, 0]], np.uint8),
    np.array([5, 3, 9]),
    "multi_label",
)
SINGLE = Predictions(
    np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]]),
    np.eye(3, dtype=np.uint8)[[0, 1, 2, 1]],
    np.arange(4),
    "single_label",
)


def test_confusion_by_hand() -> None:
    # Sample 0 finds label 0 and says 2 in place of 1; sample 1 says 1 in place of 0; sample 2 finds label 0.
    np.testing.assert_array_equal(
        [confusion(MULTI), confusion(SINGLE)],
        [[[2, 1, 0], [0, 0, 1], [0, 0, 0]], [[1, 0, 0], [1, 0, 1], [0, 0, 1]]],
    )


def test_losses_and_extremes_by_hand() -> None:
    np.testing.assert_allclose(SINGLE.losses, -np.log([0.7, 0.3, 0.8, 0.3]))
    np.testing.assert_allclose(MULTI.losses[2], -np.log([0.5, 0.9, 0.8]).mean())
    worst, best = SINGLE.extremes(16)
    assert (set(worst), list(best)) == ({1, 3}, [2, 0])


def test_thresholds_have_the_largest_f1_and_are_of_labels_alone() -> None:
    # Label 0 is everywhere, so below 0.4. Label 1 is in sample 0 alone, which has 0.2. Label 2 is nowhere.
    assert MULTI.thresholds == pytest.approx([0.2, 0.15, 0.5])
    assert SINGLE.thresholds == []
    assert thresholds_of(
        {"val": Evaluation({}, [], MULTI), "val_ema": Evaluation({}, [], SINGLE), "other": Evaluation({}, [])}
    ) == {"val": MULTI.thresholds}


def test_precision_and_recall_are_those_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    targets = (random.random((500, 1)) < 0.3).astype(np.uint8)
    scores = np.round(np.clip(0.4 * targets + random.random((500, 1)) * 0.6, 0, 1), 2)  # with equal scores
    recall, precision = precision_recall(Predictions(scores, targets, np.arange(500), "multi_label"), 0)
    expected_precision, expected_recall, _ = precision_recall_curve(targets[:, 0], scores[:, 0])
    assert set(zip(recall.round(9), precision.round(9), strict=True)) <= set(
        zip(expected_recall.round(9), expected_precision.round(9), strict=True)
    )
    steps = np.diff(np.concatenate([[0.0], recall]))
    assert float(steps @ precision) == pytest.approx(average_precision_score(targets[:, 0], scores[:, 0]))
    assert len(precision_recall(Predictions(scores, np.zeros_like(targets), np.arange(500), "multi_label"), 0)[0]) == 0


def render(figure: Figure) -> None:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    assert stream.getvalue().startswith(b"\x89PNG")


def shown_in_sheet(predictions: Predictions) -> list[int]:
    """The rows whose images are drawn in the contact sheet, which renders."""
    shown: list[int] = []

    def image_of(row: int) -> np.ndarray:
        shown.append(row)
        return np.zeros((8, 8, 3), np.uint8)

    render(contact_sheet(predictions, NAMES, image_of, "validation"))
    return shown


NAMES = ["water", "land", "a class with a name that is much longer than the others"]


@pytest.mark.parametrize("predictions", [MULTI, SINGLE])
def test_pictures_render(predictions: Predictions) -> None:
    rows = [{"class": name, "support": 3, "average_precision": 0.5} for name in NAMES]
    render(precision_recall_curves(predictions, rows, "validation"))
    render(confusion_picture(predictions, NAMES, "validation"))
    worst, best = predictions.extremes(16)
    assert shown_in_sheet(predictions) == [*predictions.rows[worst], *predictions.rows[best]]


def test_a_split_of_one_sample_shows_nothing() -> None:
    """One sample is neither among the worst half nor among the best."""
    assert shown_in_sheet(Predictions(MULTI.probabilities[:1], MULTI.targets[:1], MULTI.rows[:1], "multi_label")) == []
