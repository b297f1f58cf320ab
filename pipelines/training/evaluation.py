"""Metrics of one split: counts summed and scores gathered over the ranks before any ratio."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import tensorflow as tf

from models.metrics import (
    Metric,
    average_precision_per_class,
    f1_macro,
    f1_micro,
    mean_average_precision,
    multi_label_counts,
    per_class_table,
    single_label_counts,
    top_k_correct,
)
from pipelines.dataset.reader import SplitReader, evaluation_batches
from pipelines.launch.report import step_done
from pipelines.sample import Task
from pipelines.training.collective import HorovodCollective
from pipelines.training.results import Evaluation
from pipelines.training.tensors import image_tensors

_ACTIVATIONS = {"multi_label": tf.sigmoid, "single_label": tf.nn.softmax}


def evaluate(
    predict: Callable[[dict[str, tf.Tensor]], tf.Tensor],
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None,
    reader: SplitReader,
    collective: HorovodCollective,
    *,
    batch_size: int,
    class_names: Sequence[str],
    task: Task,
    from_logits: bool = True,
    own_metrics: Mapping[str, Metric] = MappingProxyType({}),
) -> Evaluation:
    """Score every sample of the split exactly once; each rank scores a part of them.

    Args:
        predict: Gives logits or probabilities `(batch, classes)` for images.
        loss: Per-sample loss of targets and predictions; None where predictions are probabilities.
        reader: The split.
        collective: All ranks call this together.
        batch_size: Number of samples in one batch of one rank.
        class_names: In the order of the predictions.
        task: Says how logits become probabilities, and which scores there are.
        from_logits: Whether `predict` returns logits.
        own_metrics: Further metrics by name, of the scores of all ranks.
    """
    classes = len(class_names)
    scores, targets = [np.zeros((0, classes), np.float32)], [np.zeros((0, classes), np.uint8)]
    loss_sum = 0.0
    for batch in evaluation_batches(reader, batch_size=batch_size, rank=collective.rank, size=collective.size):
        output = predict(image_tensors(batch.images))
        step_done()
        kept = batch.weights > 0
        if loss is not None:
            losses = loss(tf.cast(batch.targets, tf.float32), output)
            loss_sum += float(np.sum(np.asarray(losses, np.float64)[kept]))
        scores.append(np.asarray(_ACTIVATIONS[task](output) if from_logits else output)[kept])
        targets.append(batch.targets[kept])
    own_scores, own_targets = np.concatenate(scores), np.concatenate(targets)
    metrics = {}
    if task == "multi_label":
        counts = collective.sum(multi_label_counts(own_scores, own_targets))
        metrics["f1_micro"] = f1_micro(counts)
    else:
        counts = collective.sum(single_label_counts(own_scores, own_targets))
        for k in (1, 5) if classes > 5 else (1,):
            correct = collective.sum(np.array([top_k_correct(own_scores, own_targets, k)], np.int64))
            metrics[f"top_{k}"] = int(correct[0]) / len(reader)
    all_scores, all_targets = collective.concatenate(own_scores), collective.concatenate(own_targets)
    precisions = average_precision_per_class(all_scores, all_targets)
    metrics["f1_macro"] = f1_macro(counts)
    metrics["mean_average_precision"] = mean_average_precision(precisions)
    total_loss = float(collective.sum(np.array([loss_sum]))[0])
    if loss is not None:
        metrics["loss"] = total_loss / len(reader)
    metrics |= {name: metric(all_targets, all_scores) for name, metric in own_metrics.items()}
    return Evaluation(metrics, per_class_table(class_names, counts, precisions))
