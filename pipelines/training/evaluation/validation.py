"""The validation after every epoch: of the model, and of the average of its weights if there is one."""

from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.schema import RunConfig
from conf.sections.dataset import ReaderConfig
from models.losses import classification_loss
from pipelines.dataset.format.manifest import Manifest
from pipelines.dataset.read.reader import SplitReader
from pipelines.dataset.report.figures import visible
from pipelines.sample import VALIDATION_SPLIT
from pipelines.tracking.metrics import AVERAGED_GROUP, VALIDATION_GROUP
from pipelines.training.evaluation.evaluation import evaluate
from pipelines.training.ranks.collective import HorovodCollective
from pipelines.training.ranks.results import Evaluation
from pipelines.training.setup.input import reader_settings
from pipelines.training.setup.objective import make_metrics
from pipelines.training.step.step import make_predict
from pipelines.training.step.weight_average import WeightAverage

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
    predict: Callable[[dict[str, tf.Tensor]], tf.Tensor] = make_predict(model, jit_compile=config.training.jit_compile)

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
            keeps_predictions=True,
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
        images = split.gather(np.array([row])).images
        return visible({name: values[0] for name, values in images.items()}, manifest.groups)

    return image_of
