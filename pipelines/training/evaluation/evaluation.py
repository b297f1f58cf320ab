"""The metrics of one split, computed from the scores of all ranks."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import tensorflow as tf

from models.metrics import Metric, classification_scores, per_class_table
from pipelines.dataset.read.reader import SplitReader, evaluation_batches
from pipelines.launch.rank.report import step_done
from pipelines.sample import Task
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.predictions import Predictions
from pipelines.training.ranks.results import Evaluation
from pipelines.training.step.tensors import image_tensors

_ACTIVATIONS = {"multi_label": tf.sigmoid, "single_label": tf.nn.softmax}


def evaluate(
    predict: Callable[[dict[str, tf.Tensor]], tf.Tensor],
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    reader: SplitReader,
    collective: HorovodCollective,
    *,
    batch_size: int,
    class_names: Sequence[str],
    task: Task,
    own_metrics: Mapping[str, Metric] = MappingProxyType({}),
    keeps_predictions: bool = False,
) -> Evaluation:
    """Score every sample of the split exactly once; each rank scores a part of them.

    Args:
        predict: Returns logits `(batch, classes)` for images.
        loss: Per-sample loss from targets and logits.
        reader: Reader of the split.
        collective: The ranks, which call this together.
        batch_size: Number of samples in one batch of one rank.
        class_names: Names of the classes, in the order of the predictions.
        task: Decides how logits become probabilities, and which scores exist.
        own_metrics: Further metrics by name, computed from the scores of all ranks.
        keeps_predictions: Whether the result has all predictions; the same on every rank.

    Raises:
        FloatingPointError: A probability is not finite. Every rank raises this error.
    """
    classes = len(class_names)
    scores, targets = [np.zeros((0, classes), np.float32)], [np.zeros((0, classes), np.uint8)]
    rows = [np.zeros(0, np.int64)]
    loss_sum = 0.0
    for batch in evaluation_batches(reader, batch_size=batch_size, rank=collective.rank, size=collective.size):
        output = predict(image_tensors(batch.images))
        step_done()
        real = batch.weights > 0
        losses = loss(tf.cast(batch.targets, tf.float32), output)
        loss_sum += float(np.sum(np.asarray(losses, np.float64)[real]))
        scores.append(np.asarray(_ACTIVATIONS[task](output))[real])
        targets.append(batch.targets[real])
        rows.append(batch.rows[real])
    all_scores = collective.concatenate(np.concatenate(scores))
    if not np.isfinite(all_scores).all():
        raise FloatingPointError("the model's probabilities are not finite")
    all_targets = collective.concatenate(np.concatenate(targets))
    found = classification_scores(all_scores, all_targets, task)
    total_loss = float(collective.sum(np.array([loss_sum]))[0])
    metrics = {**found.metrics, "loss": total_loss / len(reader)}
    metrics |= {name: metric(all_targets, all_scores) for name, metric in own_metrics.items()}
    predictions = None
    if keeps_predictions:
        all_rows = collective.concatenate(np.concatenate(rows))
        predictions = Predictions(all_scores, all_targets, all_rows, task)
    per_class = per_class_table(class_names, found.counts, found.average_precisions)
    return Evaluation(metrics, per_class, predictions)
