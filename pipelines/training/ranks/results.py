"""The results that workers send to the driver. The driver imports this module, so it imports no TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from models.metrics import ClassScores
    from pipelines.tracking.store.store import TrackedRun

from pipelines.machine.console import escape
from pipelines.training.ranks.predictions import Predictions


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one split, the same on every rank."""

    metrics: dict[str, float]
    per_class: "list[ClassScores]"
    """Scores of each class, from `models.metrics.per_class_table`."""
    predictions: Predictions | None = None
    """Predictions for all samples, if they were requested."""
    split: str = ""
    """Name of the measured split; empty during training."""
    run: "TrackedRun | None" = None
    """MLflow run with the report and the plots; None during training."""

    @property
    def table(self) -> "pandas.DataFrame":
        """The metrics of each class, one row per class, the most frequent class first."""
        import pandas

        return pandas.DataFrame(self.per_class).set_index("class").sort_values("support", ascending=False)

    def plot(self) -> "Figure":
        """Plot F1 and average precision of each class."""
        from pipelines.training.record.plots import per_class_bars

        return per_class_bars(self.per_class, self.split)

    def _repr_html_(self) -> str:
        from pipelines.tracking.store.queries import link_to

        link = "" if self.run is None else f"<p>{escape(self.split)}: MLflow run {link_to(self.run)}</p>"
        metrics = "".join(
            f"<tr><th>{escape(name)}</th><td>{value:.4f}</td></tr>" for name, value in self.metrics.items()
        )
        return f"{link}<table>{metrics}</table>{self.table.to_html(float_format='{:.3f}'.format, border=0)}"


Thresholds = Mapping[str, list[float]]
"""The smallest probability of each predicted class, by metric group: of the model, and of its averaged weights."""


def thresholds_of(evaluations: Mapping[str, Evaluation]) -> dict[str, list[float]]:
    """Tune the thresholds of a multi-label model on all predictions of the validation split."""
    found = {group: each.predictions.thresholds for group, each in evaluations.items() if each.predictions is not None}
    return {group: thresholds for group, thresholds in found.items() if thresholds}


@dataclass(frozen=True)
class TrainingSummary:
    """The summary of one finished training."""

    model_uri: str
    """URI of the model in MLflow; empty if MLflow did not receive it, and on ranks other than 0."""
    history: list[dict[str, float]]
    """Metrics of each epoch."""
    checkpoint: str
    """Path of the newest checkpoint."""
    payload_bytes_per_step: int
    """Bytes that one rank passes to the collective in each step; only rank 0 has this and the model's URI."""
    not_recorded: str = ""
    """Reason why MLflow did not receive everything; otherwise empty."""
    averaged_model_uri: str = ""
    """URI in MLflow of the model with averaged weights; also empty without `training.ema`."""
    model_epoch: int = 0
    """Number of the epoch whose weights the model has, from 1; 0 on ranks other than 0."""
    ended: str = ""
    """Reason why training ended; empty if epochs are not compared."""
