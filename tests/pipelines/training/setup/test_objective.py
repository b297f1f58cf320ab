"""Losses and metrics by import path: found and tried before any rank starts."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from sklearn.metrics import label_ranking_average_precision_score, log_loss

from conf.load import load
from pipelines.tracking.metrics import unlisted, validation_metrics
from pipelines.training.driver.checks import check_own_metrics
from pipelines.training.driver.trial import build_parts, has_own_parts
from pipelines.training.setup.recipe import make_loss, make_metrics
from tests.pipelines.training.manifests import rgb_manifest

MANIFEST = rgb_manifest((8, 8, 3), task="multi_label", class_names=("water", "forest", "town"))
MODULE = """
import numpy as np

def squared(targets, logits, scale):
    return scale * (targets - logits) ** 2

def mean(targets, logits):
    return np.float32(0)

def pairs(targets, logits):
    return logits[:, 0][:2]

def broken(targets, logits):
    raise KeyError("no")

def of_the_first(targets, scores, factor):
    return factor * scores[:, 0].mean()

def table(targets, scores):
    return scores
"""
FOCAL = "{name: import, path: 'keras.losses:binary_focal_crossentropy', settings: {from_logits: true, gamma: 3.0}}"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "somebodys_objective.py").write_text(MODULE)


def config(*settings: str) -> Any:
    return load("smoke", ["model.width_factor=0.125", *settings])


def test_a_loss_of_keras_by_its_path() -> None:
    chosen = config(f"training.loss={FOCAL}")
    assert has_own_parts(chosen)
    random = np.random.default_rng(0)
    targets, logits = random.integers(0, 2, (5, 3)).astype(np.uint8), random.normal(size=(5, 3)).astype(np.float16)
    inputs = targets.astype(np.float32), logits.astype(np.float32)
    losses = make_loss(chosen.training, MANIFEST)(targets, logits)
    np.testing.assert_allclose(
        losses, keras.losses.binary_focal_crossentropy(*inputs, from_logits=True, gamma=3.0), rtol=1e-6
    )
    assert losses.dtype == "float32"
    build_parts(chosen, MANIFEST)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        *(
            (f"loss={{name: import, path: 'somebodys_objective:{function}'}}", message)
            for function, message in (
                ("nothing", r"^training\.loss\.path=somebodys_objective:nothing: somebodys_objective has no nothing$"),
                (
                    "mean",
                    r"the function returned losses of the shape \(\), expected one per sample, \(batch,\), and not",
                ),
                ("pairs", r"the function returned 2 losses for 6 samples$"),
                ("broken", r"^training\.loss\.path=somebodys_objective:broken: the function raised KeyError: 'no'$"),
                ("squared", r"function raised TypeError: squared\(\) missing 1 required positional argument: 'scale'$"),
            )
        ),
        *(
            (f"metrics={{mine: {{path: 'somebodys_objective:{function}'}}}}", message)
            for function, message in (
                ("table", r"^training\.metrics\.mine\.path=somebodys_objective:table: the function raised TypeError"),
                ("of_the_first", r"missing 1 required positional argument: 'factor'$"),
            )
        ),
    ],
)
def test_a_loss_or_metric_that_does_not_fit_is_one_line(setting: str, message: str) -> None:
    chosen = config(f"training.{setting}")
    with pytest.raises(ValueError, match=message):
        build_parts(chosen, MANIFEST)


@pytest.mark.parametrize("other", ["training.label_smoothing=0.1", "training.class_weights=balanced"])
def test_settings_of_the_cross_entropy_are_not_for_another_loss(other: str) -> None:
    with pytest.raises(ValueError, match=r"is for training\.loss=cross_entropy, and training\.loss is keras\.losses:"):
        config(f"training.loss={FOCAL}", other)


def test_metrics_of_scikit_learn_by_their_paths() -> None:
    chosen = config(
        "training.metrics={ranking: {path: 'sklearn.metrics:label_ranking_average_precision_score'}, "
        "first: {path: 'somebodys_objective:of_the_first', settings: {factor: 2.0}}}"
    )
    assert has_own_parts(chosen)
    random = np.random.default_rng(0)
    targets, scores = random.integers(0, 2, (20, 3)).astype(np.uint8), random.random((20, 3)).astype(np.float32)
    values = {name: metric(targets, scores) for name, metric in make_metrics(chosen.training.metrics).items()}
    expected = {"ranking": label_ranking_average_precision_score(targets, scores), "first": 2 * scores[:, 0].mean()}
    assert values == pytest.approx(expected)
    build_parts(chosen, MANIFEST)
    single = config("training.metrics={log_loss: {path: 'sklearn.metrics:log_loss'}}")
    build_parts(single, MANIFEST.model_copy(update={"task": "single_label"}))
    (metric,) = make_metrics(single.training.metrics).values()
    one_hot, likely = np.eye(3, dtype=np.uint8), np.full((3, 3), 1 / 3, np.float32)
    assert metric(one_hot, likely) == pytest.approx(log_loss(one_hot, likely))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("{f1_macro: {path: 'sklearn.metrics:f1_score'}}", r"\.f1_macro: every training has a metric of that name"),
        ("{'f1/macro': {path: 'sklearn.metrics:f1_score'}}", ""),
        ("{mine: {settings: {a: 1}}}", r"\.mine\.path is missing$"),
        ("{mine: {path: mine}}", r"\.mine\.path='mine': should be package\.module:object"),
    ],
)
def test_names_of_metrics(metrics: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"training\.metrics{message}"):
        check_own_metrics(config(f"training.metrics={metrics}").training.metrics)
    assert "val_ema/mine" in validation_metrics("multi_label", 3, averaged=True, own=["mine"])
    assert (unlisted(["test/mine"], ["mine"]), unlisted(["test/mine"])) == ([], ["test/mine"])
