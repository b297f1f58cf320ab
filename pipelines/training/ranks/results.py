"""Results that workers send to the driver, which imports this module: nothing here imports TensorFlow."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from models.metrics import ClassScores
    from pipelines.tracking.store.store import TrackedRun

from pipelines.training.ranks.predictions import Predictions


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one split, the same on every rank."""

    metrics: dict[str, float]
    per_class: "list[ClassScores]"
    """Scores of each class, by `models.metrics.per_class_table`."""
    predictions: Predictions | None = None
    """All samples, where they were asked for."""
    split: str = ""
    """Which split was measured; empty while training."""
    run: "TrackedRun | None" = None
    """MLflow run that holds the report and the plots; None while training."""

    @property
    def table(self) -> "pandas.DataFrame":
        """The metrics of each class, one row for each, the most frequent class first."""
        import pandas

        return pandas.DataFrame(self.per_class).set_index("class").sort_values("support", ascending=False)

    def plot(self) -> "Figure":
        """Plot F1 and average precision of each class."""
        from pipelines.training.record.plots import per_class_bars

        return per_class_bars(self.per_class, self.split)

    def _repr_html_(self) -> str:
        from pipelines.tracking.store.runs import link_to

        link = "" if self.run is None else f"<p>{escape(self.split)}: MLflow run {link_to(self.run)}</p>"
        metrics = "".join(
            f"<tr><th>{escape(name)}</th><td>{value:.4f}</td></tr>" for name, value in self.metrics.items()
        )
        return f"{link}<table>{metrics}</table>{self.table.to_html(float_format='{:.3f}'.format, border=0)}"


Thresholds = Mapping[str, list[float]]
"""Least probability of each predicted class, by the group of the metrics: of the model, and of its averaged weights."""


def thresholds_of(evaluations: Mapping[str, Evaluation]) -> dict[str, list[float]]:
    """Tune the thresholds of a multi-label model on the validation split, of which all predictions are there."""
    found = {group: each.predictions.thresholds for group, each in evaluations.items() if each.predictions is not None}
    return {group: thresholds for group, thresholds in found.items() if thresholds}


@dataclass(frozen=True)
class TrainingSummary:
    """One finished training."""

    model_uri: str
    """Where MLflow has the model; empty where it has not taken it, and on ranks other than 0."""
    history: list[dict[str, float]]
    """Metrics of each epoch."""
    checkpoint: str
    """Path of the newest checkpoint."""
    payload_bytes_per_step: int
    """Bytes that one rank gives to the collective in each step; only rank 0 has this and the model's URI."""
    not_recorded: str = ""
    """Why MLflow has not taken everything; empty where it has."""
    averaged_model_uri: str = ""
    """Where MLflow has the model with averaged weights; empty without `training.ema` too."""
    model_epoch: int = 0
    """Number of the epoch whose weights the model has, from 1; 0 on ranks other than 0."""
    ended: str = ""
    """Why training ended; empty where epochs are not compared."""
