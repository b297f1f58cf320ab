"""Metrics of one split: counts summed and scores gathered over the ranks before any ratio."""

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from models.metrics import (
    average_precision_per_class,
    f1_macro,
    f1_micro,
    mean_average_precision,
    multi_label_counts,
    per_class_table,
)
from pipelines.dataset.reader import SplitReader, evaluation_batches
from pipelines.training.collective import HorovodCollective
from pipelines.training.results import Evaluation


def evaluate(
    predict: Callable[[dict[str, tf.Tensor]], tf.Tensor],
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None,
    reader: SplitReader,
    collective: HorovodCollective,
    *,
    batch_size: int,
    class_names: Sequence[str],
    from_logits: bool = True,
) -> Evaluation:
    """Score every sample of the split once, on whichever rank.

    Args:
        predict: Images to logits or probabilities `(batch, classes)`.
        loss: Per-sample loss of targets and predictions; None where predictions are probabilities.
        reader: The split.
        collective: All ranks call this together.
        batch_size: Per rank.
        class_names: In the order of the predictions.
        from_logits: Whether `predict` returns logits.
    """
    classes = len(class_names)
    scores, targets = [np.zeros((0, classes), np.float32)], [np.zeros((0, classes), np.uint8)]
    loss_sum = 0.0
    for batch in evaluation_batches(reader, batch_size=batch_size, rank=collective.rank, size=collective.size):
        images = {name: tf.convert_to_tensor(image) for name, image in batch.images.items()}
        output = predict(images)
        kept = batch.weights > 0
        if loss is not None:
            losses = loss(tf.cast(batch.targets, tf.float32), output)
            loss_sum += float(np.sum(np.asarray(losses, np.float64)[kept]))
        probabilities = tf.sigmoid(output) if from_logits else output
        scores.append(np.asarray(probabilities)[kept])
        targets.append(batch.targets[kept])
    own_scores, own_targets = np.concatenate(scores), np.concatenate(targets)
    counts = collective.sum(multi_label_counts(own_scores, own_targets))
    total_loss = float(collective.sum(np.array([loss_sum]))[0])
    precisions = average_precision_per_class(collective.concatenate(own_scores), collective.concatenate(own_targets))
    metrics = {
        "f1_micro": f1_micro(counts),
        "f1_macro": f1_macro(counts),
        "mean_average_precision": mean_average_precision(precisions),
    }
    if loss is not None:
        metrics["loss"] = total_loss / len(reader)
    return Evaluation(metrics, per_class_table(class_names, counts, precisions))
