"""The scores of a fitted head and of the model's own head on a split, from the features alone, and their display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.sections.probe import CoCoAConfig, SolverConfig
from models.probes.head import LinearHead
from pipelines.machine.console import escape
from pipelines.probing.features import Features, as_array
from pipelines.probing.worker import FittedHead
from pipelines.sample import TEST_SPLIT, Task
from pipelines.scoring.report.evaluation import Measured, SplitScores, measure
from pipelines.training.ranks.results import Evaluation


def scores_of(features: Features, split: str, head: LinearHead | None) -> SplitScores:
    """Return the probabilities of every sample of a split, one row group of features at a time.

    Args:
        features: Finished features.
        split: Name of the split, which must have samples.
        head: The head; None: the model's own head.
    """
    ids: list[str] = []
    probabilities, targets = [], []
    for table in features.read(split, ["id", "probabilities" if head is None else "features", "targets"]):
        ids += table["id"].to_pylist()
        targets.append(as_array(table["targets"]))
        probabilities.append(
            as_array(table["probabilities"]) if head is None else head.probabilities(as_array(table["features"]))
        )
    return SplitScores(ids, np.concatenate(probabilities), np.concatenate(targets))


def measure_head(
    features: Features,
    head: LinearHead | None,
    *,
    split: str,
    tuned_on: str | None,
    class_names: Sequence[str],
    task: Task,
    has_probabilities: bool = True,
) -> Measured:
    """Measure a head as `evaluate` measures a model.

    Args:
        features: Finished features.
        head: The head; None: the model's own head.
        split: Split to measure.
        tuned_on: Split that tunes the thresholds of a multi-label head; None: they are not tuned.
        class_names: Names of the classes.
        task: Task, which determines the scores.
        has_probabilities: Whether the head returns probabilities; scores of the hinge loss only have an order.
    """
    measured = measure(
        scores_of(features, split, head),
        class_names=class_names,
        task=task,
        columns=pa.table({}),
        own_metrics={},
        validation=scores_of(features, tuned_on, head) if tuned_on is not None else None,
    )
    if not has_probabilities:
        for name in ("loss", "expected_calibration_error"):
            del measured.metrics[name]
    return measured


@dataclass(frozen=True)
class Probed:
    """The result of a probe."""

    evaluation: Evaluation
    """The test scores of the fitted head."""
    own_metrics: dict[str, float] | None
    """The test scores of the model's own head; None if its classes are not those of the dataset."""
    fitted: FittedHead

    def _repr_html_(self) -> str:
        table = "\n".join(comparison_lines(self.evaluation.metrics, self.own_metrics))
        return f"<pre>{escape(table)}</pre>{self.evaluation._repr_html_()}"


def penalty_lines(fitted: FittedHead, solver: SolverConfig) -> list[str]:
    """Return a table of the penalties, and notes for the user."""
    residual = "duality gap" if isinstance(solver, CoCoAConfig) else "gradient"
    lines = [f"{'l2':>10}  {f'val/{fitted.metric}':>26}  {'exchanges':>9}  {residual:>11}"]
    lines += [
        f"{each.l2:>10.3g}  {each.score:>26.4f}  {each.exchanges:>9}  {each.residual:>11.2g}"
        + "  chosen" * (each.l2 == fitted.chosen.l2)
        for each in fitted.tried
    ]
    limit = (
        f"max_rounds={solver.max_rounds}"
        if isinstance(solver, CoCoAConfig)
        else f"max_iterations={solver.max_iterations}"
    )
    lines += [
        f"warning: the fit for l2={each.l2:g} ended with a {residual} of {each.residual:.2g}, above the tolerance of "
        f"{solver.tolerance:g}: raise probe.solver.{limit}, or the tolerance"
        for each in fitted.tried
        if not each.converged
    ]
    for extreme, end, further in ((fitted.tried[0], "largest", "larger"), (fitted.tried[-1], "smallest", "smaller")):
        if len(fitted.tried) > 1 and fitted.chosen.l2 == extreme.l2:
            lines.append(f"the chosen penalty is the {end} of probe.l2: a {further} one may be better")
    return lines


def comparison_lines(metrics: Mapping[str, float], own_metrics: Mapping[str, float] | None) -> list[str]:
    """Return the test scores of a probe, beside those of the model's own head if it has the same classes."""
    beside = {name: "" if own_metrics is None else f"  {own_metrics[name]:>9.4f}" for name in metrics}
    return [
        f"{'metric':<34} {'probe':>9}" + ("" if own_metrics is None else f"  {'own head':>9}"),
        *(f"{f'{TEST_SPLIT}/{name}':<34} {value:>9.4f}{beside[name]}" for name, value in metrics.items()),
    ]
