"""The validation after every epoch: of the model, and of the average of its weights if there is one."""

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.schema import RunConfig
from conf.sections.dataset import ReaderConfig
from models.losses import classification_loss
from models.metrics import Metric, classification_scores, per_class_table
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import SplitReader, evaluation_batches
from pipelines.dataset.report.figures import visible
from pipelines.launch.rank.report import step_done
from pipelines.sample import VALIDATION_SPLIT, Task
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.predictions import Predictions
from pipelines.training.ranks.results import Evaluation
from pipelines.training.setup.input import reader_settings
from pipelines.training.setup.recipe import make_metrics
from pipelines.training.step.step import make_predict
from pipelines.training.step.tensors import image_tensors
from pipelines.training.step.weight_average import WeightAverage

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
    own_metrics: Mapping[str, Metric],
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

    Raises:
        FloatingPointError: A probability is not finite. Every rank raises this error.
    """
    classes = len(class_names)
    # Probabilities, targets and rows by batch, after an empty batch for a rank without samples.
    parts = [(np.zeros((0, classes), np.float32), np.zeros((0, classes), np.uint8), np.zeros(0, np.int64))]
    loss_sum = 0.0
    for batch in evaluation_batches(reader, batch_size=batch_size, rank=collective.rank, size=collective.size):
        output = predict(image_tensors(batch.images))
        step_done()
        real = batch.weights > 0
        losses = loss(tf.cast(batch.targets, tf.float32), output)
        loss_sum += float(np.sum(np.asarray(losses, np.float64)[real]))
        parts.append((np.asarray(_ACTIVATIONS[task](output))[real], batch.targets[real], batch.rows[real]))
    all_scores, all_targets, all_rows = (
        collective.concatenate(np.concatenate(column)) for column in zip(*parts, strict=True)
    )
    if not np.isfinite(all_scores).all():
        raise FloatingPointError("the model's probabilities are not finite")
    found = classification_scores(all_scores, all_targets, task)
    metrics = {**found.metrics, "loss": float(collective.sum(np.array([loss_sum]))[0]) / len(reader)}
    metrics |= {name: metric(all_targets, all_scores) for name, metric in own_metrics.items()}
    return Evaluation(
        metrics,
        per_class_table(class_names, found.counts, found.average_precisions),
        Predictions(all_scores, all_targets, all_rows, task),
    )


Validate = Callable[[], Mapping[str, Evaluation]]


def make_validation(
    config: RunConfig,
    manifest: Manifest,
    model: keras.Model,
    collective: HorovodCollective,
    average: WeightAverage | None = None,
) -> Validate:
    """Return the function that scores the validation split on all ranks.

    The function returns the scores by metric group: "val" for the model, "val_ema" for its averaged weights. It returns
    no scores if the dataset has no validation split. The loss is the plain one, whatever loss training uses.
    """
    if VALIDATION_SPLIT not in manifest.splits:
        return dict
    loss, own_metrics = classification_loss(manifest.task), make_metrics(config.training.metrics)
    reader = SplitReader(config.dataset.path, VALIDATION_SPLIT, reader_settings(config.reader))
    predict = make_predict(model, jit_compile=config.training.jit_compile)

    def score() -> Evaluation:
        return evaluate(
            predict,
            loss,
            reader,
            collective,
            batch_size=config.training.batch_size_per_worker,
            class_names=manifest.class_names,
            task=manifest.task,
            own_metrics=own_metrics,
        )

    def validate() -> Mapping[str, Evaluation]:
        scores = {VALIDATION_GROUP: score()}
        if average is not None:
            with average.in_model():
                scores[AVERAGED_GROUP] = score()
        return scores

    return validate


def validation_images(
    dataset: str, reader: ReaderConfig, manifest: Manifest
) -> Callable[[int], NDArray[np.uint8]] | None:
    """Return the function from a row of the validation split to its visible pixels; None without such a split."""
    if VALIDATION_SPLIT not in manifest.splits:
        return None
    split = SplitReader(dataset, VALIDATION_SPLIT, reader_settings(reader))

    def image_of(row: int) -> NDArray[np.uint8]:
        return visible(
            {name: values[0] for name, values in split.gather(np.array([row])).images.items()}, manifest.groups
        )

    return image_of
