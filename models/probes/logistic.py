"""Logistic regression over the samples of all ranks, by L-BFGS."""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

from models.probes.agreement import Array, SumOverRanks, agreed_sum
from models.probes.solution import Solution

_CORRECTIONS = 10
_EVALUATIONS_PER_ITERATION = 10


def fit_logistic(
    design: Array,
    targets: Array,
    sum_over_ranks: SumOverRanks,
    *,
    task: str,
    rows: int,
    l2: float,
    max_iterations: int,
    tolerance: float,
    start: Array | None = None,
) -> Solution:
    """Minimise the mean loss of all samples with a penalty on the weights, and none on the intercepts.

        1/n sum_i loss(x_i W + b, t_i) + l2/2 |W|^2

    With one label, the loss is the cross-entropy of a softmax. With several labels, it is the sum of the classes'
    logistic losses, which makes one regression per class. The `C` of scikit-learn is 1 / (l2 n).

    Every evaluation needs one allreduce of the value and the gradient: 8 bytes for each weight. All ranks then take the
    same step.

    Args:
        design: Standardised features with a last column of ones, `(rows of this rank, features + 1)`.
        targets: 0 or 1, `(rows of this rank, classes)`.
        sum_over_ranks: The collective.
        task: "single_label" or "multi_label".
        rows: Samples n of all ranks.
        l2: Penalty, above 0.
        max_iterations: Largest number of iterations.
        tolerance: Largest component of the gradient at which the fit ends. Below about 1e-8, rounding may end it
            earlier.
        start: `state` of a fit for another penalty; None: weights 0, and intercepts by the counts of the classes.

    Raises:
        RuntimeError: The ranks have different weights.

    Source: Dean et al. 2012, "Large scale distributed deep networks", section 4.2 (Sandblaster L-BFGS), for one
    gradient summed over workers. Liu and Nocedal 1989; Byrd et al. 1995, as in SciPy, for the method.
    Differs: there is no coordinator; every rank keeps the history of L-BFGS and computes the step itself.
    """
    shape = design.shape[1], targets.shape[1]
    losses_of = _multinomial if task == "single_label" else _one_per_class
    exchanges = 0

    def evaluate(flat: Array) -> tuple[float, Array]:
        nonlocal exchanges
        exchanges += 1
        weights = flat.reshape(shape)
        loss, slopes = losses_of(design @ weights, targets)
        summed = agreed_sum(np.append((design.T @ slopes).ravel(), loss), flat, sum_over_ranks) / rows
        penalised = weights.copy()
        penalised[-1] = 0
        value = float(summed[-1] + l2 / 2 * np.square(penalised).sum())
        return value, summed[:-1] + l2 * penalised.ravel()

    if start is None:
        start = np.zeros(shape)
        positives = agreed_sum(targets.sum(axis=0), start, sum_over_ranks)
        start[-1] = _intercepts(positives, rows, task)
        exchanges += 1
    found = minimize(
        evaluate,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": max_iterations,
            "maxfun": _EVALUATIONS_PER_ITERATION * max_iterations,
            "maxcor": _CORRECTIONS,
            "gtol": tolerance,
            "ftol": 0.0,
        },
    )
    value, gradient = evaluate(found.x)  # this also proves that the ranks end with the same bits
    residual = float(np.abs(gradient).max())
    weights = found.x.reshape(shape)
    return Solution(weights, value, exchanges, residual, residual <= tolerance, weights)


def _intercepts(positives: Array, rows: int, task: str) -> Array:
    """Return the best intercepts without features, as if each class had half a sample more on either side."""
    logs: Array = np.log(positives + 0.5)
    others = logs.mean() if task == "single_label" else np.log(rows - positives + 0.5)
    return np.asarray(logs - others)


def _multinomial(scores: Array, targets: Array) -> tuple[float, Array]:
    """Return the sum of the cross-entropies, and their slopes in the scores."""
    logs = log_softmax(scores, axis=1)
    return -float((targets * logs).sum()), np.exp(logs) - targets


def _one_per_class(scores: Array, targets: Array) -> tuple[float, Array]:
    """Return the sum of the logistic losses of all classes, and their slopes in the scores."""
    return float((np.logaddexp(0, scores) - targets * scores).sum()), expit(scores) - targets
