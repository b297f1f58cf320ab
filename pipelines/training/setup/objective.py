"""The loss that a training minimises, and its metrics in addition to the usual ones."""

from collections.abc import Mapping

from conf.sections.training import ImportedLossConfig, MetricConfig, TrainingConfig
from models.losses import Loss, classification_loss, imported_loss
from models.metrics import Metric, imported_metric
from pipelines.dataset.format.manifest import Manifest
from pipelines.training.setup.class_weights import class_weights


def make_loss(training: TrainingConfig, manifest: Manifest) -> Loss:
    """Return the per-sample loss of training.

    Raises:
        ValueError: The import path of the loss is not found, or class weights do not fit the dataset.
    """
    if isinstance(training.loss, ImportedLossConfig):
        return imported_loss(training.loss.path, training.loss.settings, setting="training.loss.path")
    return classification_loss(
        manifest.task,
        label_smoothing=training.label_smoothing,
        class_weights=class_weights(training.class_weights, manifest),
    )


def make_metrics(config: Mapping[str, MetricConfig]) -> dict[str, Metric]:
    """Return the metrics of `training.metrics` by name.

    Raises:
        ValueError: A metric is not found.
    """
    return {
        name: imported_metric(metric.path, metric.settings, setting=f"training.metrics.{name}.path")
        for name, metric in config.items()
    }
