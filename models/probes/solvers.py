"""The solvers of linear heads over the samples of all ranks.

They are logistic regression by L-BFGS, and support-vector machines by dual coordinate ascent.
"""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_softmax

Array = NDArray[np.float64]
SumOverRanks = Callable[[Array], Array]
"""Function from a rank's array to the sum of the arrays of all ranks, with the same bits on every rank."""


def agreed_sum(values: Array, weights: NDArray[Any], sum_over_ranks: SumOverRanks) -> Array:
    """Sum values over ranks that hold equal weights.

    Each rank runs the same solver, which may round differently on other processors. Ranks would then run different
    numbers of iterations and wait for each other forever. Therefore 33 numbers are sent with the values. They are a 1,
    and the SHA-256 of the weights as 16 whole numbers d of 16 bits, with their squares. By Cauchy and Schwarz

        ranks * sum(d^2) >= sum(d)^2,  equal only where all ranks have the same d

    and in float64 these sums are exact on up to two million ranks.

    Args:
        values: One-dimensional; the same length on every rank.
        weights: Array that must have the same bits on every rank.
        sum_over_ranks: The collective.

    Raises:
        RuntimeError: The ranks have different weights; all ranks raise this error.
    """
    digest = hashlib.sha256(np.ascontiguousarray(weights).tobytes()).digest()
    words = np.frombuffer(digest, "<u2").astype(np.float64)
    summed = sum_over_ranks(np.concatenate([values, [1.0], words, words**2]))
    ranks, totals, squares = summed[len(values)], summed[len(values) + 1 :][:16], summed[-16:]
    if not np.array_equal(ranks * squares, totals**2):
        raise RuntimeError(
            f"the weights of the probe are not the same on all {int(ranks)} ranks: processors of several kinds may "
            "round differently. Run all ranks on hosts of one kind, or set launch.num_workers=1"
        )
    return summed[: len(values)]


@dataclass(frozen=True)
class Solution:
    """A fit for one penalty."""

    weights: Array
    """`(features + 1, classes)`, the same bits on every rank; the last row has the intercepts."""
    objective: float
    """Minimised value: the mean loss with the penalty, summed over classes."""
    exchanges: int
    """Number of sums over ranks."""
    residual: float
    """Value that the tolerance bounds: the largest component of the gradient, or the largest duality gap of a class."""
    converged: bool
    """Whether the residual is within the tolerance."""
    state: Array
    """Start for a fit with another penalty; it may be this rank's own part."""


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
    """Minimise the mean logistic loss of all samples with a penalty on the weights, and none on the intercepts.

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
        return float(summed[-1] + l2 / 2 * np.square(penalised).sum()), summed[:-1] + l2 * penalised.ravel()

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
            "maxfun": 10 * max_iterations,
            "maxcor": 10,
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


def fit_hinge(
    design: Array,
    targets: Array,
    sum_over_ranks: SumOverRanks,
    *,
    rank: int,
    ranks: int,
    rows: int,
    l2: float,
    max_rounds: int,
    tolerance: float,
    start: Array | None = None,
) -> Solution:
    """Minimise, for each class against the rest, the mean hinge loss with a penalty on weights and intercept.

        P(w) = l2/2 |w|^2 + 1/n sum_i max(0, 1 - y_i w.x_i)                    y_i = 1 or -1
        D(a) = 1/n sum_i a_i - l2/2 |w(a)|^2,  0 <= a_i <= 1,  w(a) = 1/(l2 n) sum_i a_i y_i x_i

    In each round every rank changes the a_i of its own samples, once each in a random order, to its best value for

        v = w + K * (what this rank has added to w in this round)              K ranks

    and w then changes by the sum over all ranks. The factor K keeps this sum from going too far. The fit ends at a
    duality gap P(w(a)) - D(a), which bounds how far P is above its minimum. The `C` of scikit-learn is 1 / (l2 n).

    A round needs one allreduce of the weights, with the values of P and D: 8 bytes for each weight.

    Args:
        design: Standardised features with a last column of ones, `(rows of this rank, features + 1)`.
        targets: 0 or 1, `(rows of this rank, classes)`.
        sum_over_ranks: The collective.
        rank: Number of this rank, which decides its random orders.
        ranks: Number of ranks K.
        rows: Samples n of all ranks.
        l2: Penalty, above 0.
        max_rounds: Largest number of rounds.
        tolerance: Largest duality gap of a class at which the fit ends.
        start: `state` of a fit for another penalty, on this rank; None: zeros.

    Raises:
        RuntimeError: The ranks have different weights.

    Source: Jaggi et al. 2014, "Communication-efficient distributed dual coordinate ascent"; Ma et al. 2015, "Adding vs.
    averaging in distributed primal-dual optimization", equation 9 with gamma = 1 and sigma' = K; Shalev-Shwartz and
    Zhang 2013 for the step of the hinge loss.
    Differs: the intercept is the weight of a feature that is always 1, and is penalised, as in LIBLINEAR. A free
    intercept would add an equation over the a_i of all ranks, which no rank could satisfy alone.
    """
    signs = 2 * targets - 1
    duals = np.zeros_like(targets) if start is None else start.copy()
    squares = np.square(design).sum(axis=1)
    classes = targets.shape[1]
    per_dual = 1 / (l2 * rows)

    def summed(added: Array, values: Array, weights: Array) -> tuple[Array, Array]:
        found = agreed_sum(np.concatenate([added.ravel(), values.ravel()]), weights, sum_over_ranks)
        return found[: added.size].reshape(added.shape), found[added.size :].reshape(values.shape)

    nothing = np.zeros((design.shape[1], classes))
    weights, _ = summed(per_dual * (design.T @ (duals * signs)), np.zeros((2, classes)), nothing)
    for number in itertools.count(1):
        values = np.stack([np.maximum(0, 1 - signs * (design @ weights)).sum(axis=0), duals.sum(axis=0)])
        moved, added = _ascend(
            design, signs, duals, squares, weights, ranks, per_dual, order=np.random.default_rng((number, rank))
        )
        added, values = summed(added, values, weights)
        penalty = l2 / 2 * np.square(weights).sum(axis=0)
        primal, dual = penalty + values[0] / rows, values[1] / rows - penalty
        gap = float((primal - dual).max())
        if gap <= tolerance or number == max_rounds:
            break  # without the last change, after which the gap is unknown
        weights, duals = weights + added, moved
    return Solution(weights, float(primal.sum()), number + 1, gap, gap <= tolerance, duals)


def _ascend(
    design: Array,
    signs: Array,
    duals: Array,
    squares: Array,
    weights: Array,
    ranks: int,
    per_dual: float,
    order: np.random.Generator,
) -> tuple[Array, Array]:
    """Change each dual variable of this rank once; return the new variables and the change of the weights."""
    duals, local = duals.copy(), weights.copy()
    for row in order.permutation(len(design)):
        features = design[row]
        rise = (1 - signs[row] * (features @ local)) / (ranks * per_dual * squares[row])
        change = np.clip(duals[row] + rise, 0, 1) - duals[row]
        duals[row] += change
        local += np.outer(features, ranks * per_dual * change * signs[row])
    return duals, (local - weights) / ranks
