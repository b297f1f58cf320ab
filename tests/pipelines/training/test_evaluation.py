"""The scores of a logged model, beside those that scikit-learn computes from its predictions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240)]


def scores_and_predictions(dataset: str, split: str) -> tuple[Any, ...]:
    """What `evaluate_worker` returns on one process, the probabilities of the same model, and the targets."""
    import keras
    import numpy as np

    from conf.load import load
    from models.networks.model import with_probabilities
    from pipelines.dataset.manifest import read_manifest
    from pipelines.dataset.reader import SplitReader
    from pipelines.tracking.models import log_model
    from pipelines.tracking.runs import start_run
    from pipelines.training.recipe import make_model
    from pipelines.training.worker import evaluate_worker

    # Two batches of five, and one of which three rows are padding.
    own = "training.metrics={coverage: {path: 'sklearn.metrics:coverage_error'}}"
    config = load("smoke", [f"dataset.path={dataset}", "training.batch_size_per_worker=5", own])
    manifest = read_manifest(dataset)
    keras.utils.set_random_seed(0)
    model = with_probabilities(make_model(config, manifest), manifest.task)
    random = np.random.default_rng(0)
    for weight in model.layers[-2].weights:  # fresh, it predicts nearly the same of every sample
        weight.assign(random.normal(0, 3, weight.shape))
    run = start_run("evaluation", None, {}, {})
    description = {"class_names": list(manifest.class_names), "task": manifest.task}
    evaluation = evaluate_worker(config, log_model(run, model, description, None, step=1), split)
    reader = SplitReader(dataset, split)
    samples = reader.gather(np.arange(len(reader)))
    return evaluation, manifest.class_names, model.predict(samples.images, verbose=0), samples.targets


@pytest.mark.long
def test_evaluate_worker_scores_each_sample_once(
    in_fresh_process: Callable[..., Any], small_dataset: Path, mlflow_store: str
) -> None:
    from sklearn.metrics import average_precision_score, coverage_error, f1_score

    evaluation, names, probabilities, targets = in_fresh_process(scores_and_predictions, str(small_dataset), "test")
    assert targets.shape == (12, len(names))
    predicted = probabilities >= 0.5
    assert 0 < predicted.mean() < 1
    assert (predicted != predicted[0]).any(), "samples differ"
    columns = range(len(names))
    precisions = {
        column: average_precision_score(targets[:, column], probabilities[:, column])
        for column in columns
        if targets[:, column].any()
    }
    assert evaluation.metrics == pytest.approx(
        {
            "f1_micro": f1_score(targets, predicted, average="micro"),
            "f1_macro": f1_score(targets, predicted, average="macro", zero_division=0),
            "mean_average_precision": sum(precisions.values()) / len(precisions),
            "coverage": coverage_error(targets, probabilities),
        },
        abs=1e-6,
    )
    assert [row["class"] for row in evaluation.per_class] == list(names)
    assert [row["support"] for row in evaluation.per_class] == targets.sum(axis=0).tolist()
    for column in columns:
        row = evaluation.per_class[column]
        assert row["f1"] == pytest.approx(f1_score(targets[:, column], predicted[:, column], zero_division=0))
        if column in precisions:
            assert row["average_precision"] == pytest.approx(precisions[column], abs=1e-6)
