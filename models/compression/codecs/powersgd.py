"""PowerSGD: gradients as products of two thin matrices that improve from step to step."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from models.compression import kernels
from models.compression.arithmetic.randomness import normal
from models.compression.codec import Codec, CollectiveName, Context, Memory, Message, Shape, StateSpec
from models.compression.schemes.piecewise import PiecewiseConstant

# A column that orthogonalisation makes shorter than this was a combination of the others, up to rounding.
_RELATIVE_ZERO = 1e-5


class PowerSGD(Codec):
    """Runs one step of subspace iteration from the previous step's result, with a residual.

        M = g + residual                               (rows, columns) = (all but the last axis, the last)
        P = orthonormal columns of (sum over ranks of M Q)
        Q_own = M^T P;  residual = M - P Q_own^T
        Q = mean over ranks of Q_own;  mean of gradients ~ P Q^T

    Both sums are linear in M, so N ranks compute the same as one rank on the mean of M. The result is exact if the rank
    of the mean of M is at most `rank`: P then spans the mean's columns after one product.

    Args:
        rank: Number of columns of P and Q, at least 1.
        rank_schedule: Pairs `(before_step, rank)` for the first steps.
        min_compression: A tensor that its factors compress by less than this factor is sent dense.
        warm_start: Whether to start from the previous Q; otherwise every step starts from a random Q.
        error_feedback: Whether what was not sent is added to the next gradient. Without it training is biased: only
            for comparison.

    Raises:
        ValueError: a value out of range.

    Source: Vogels et al. 2019, algorithms 1 and 2.
    Differs: each rank's residual is that of its own projection, as in the authors' later library. With the common
    projection, the residuals of ranks with different data drift apart without bound. A column of Q that becomes zero
    keeps its old value; otherwise a tensor with one zero gradient would stay zero forever.
    """

    name = "powersgd"
    collectives: tuple[CollectiveName, ...] = ("allreduce", "allreduce")

    def __init__(
        self,
        *,
        rank: int,
        rank_schedule: Sequence[tuple[int, int]],
        min_compression: float,
        warm_start: bool,
        error_feedback: bool,
    ) -> None:
        """Store the settings."""
        self.ranks = PiecewiseConstant(rank, rank_schedule)
        if min(self.ranks.values) < 1:
            raise ValueError(f"rank must be at least 1, got {int(min(self.ranks.values))}")
        if min_compression < 1:
            raise ValueError(f"min_compression must be at least 1, got {min_compression}")
        self.largest = int(max(self.ranks.values))
        self.min_compression, self.warm_start, self.error_feedback = min_compression, warm_start, error_feedback
        operations = kernels.load()
        self._products = _TensorflowProducts(self.largest) if operations is None else _NativeProducts(operations)
        self.compiled = self.ranks.constant and operations is None
        self.checks_finite = operations is not None

    def accepts(self, shape: Shape) -> bool:
        """Return whether P and Q together are smaller by the factor `min_compression`."""
        rows, columns = _matrix(shape)
        return self.largest * (rows + columns) * self.min_compression <= rows * columns

    def state_specs(self, shape: Shape, size: int, *, dense: bool) -> dict[str, StateSpec]:
        """Return the state: Q and the residual."""
        if dense:
            return {}
        specs = {"q": StateSpec((_matrix(shape)[1], self.largest), "shared", normal)} if self.warm_start else {}
        return specs | ({"residual": StateSpec(shape, "worker")} if self.error_feedback else {})

    def phase(self, number: int, value: tf.Tensor, memory: Memory, context: Context) -> tuple[Message, Memory]:
        """Compute the products for P; those for Q; the product of both."""
        rows, columns = _matrix(context.shape)
        # A smaller rank uses the first columns of the largest rank's factors.
        rank = self.ranks.pick(context.step, [int(value) for value in self.ranks.values])
        match number:
            case 0:
                start = memory["q"] if self.warm_start else normal((columns, self.largest), context.key)
                matrix, products, checked = self._products.project(
                    value, memory.get("residual"), context.residual_scale, start[:, :rank]
                )
                return _thin(products, rows, rank), {**memory, "start": start, "matrix": matrix, **checked}
            case 1:
                basis, own, remainder = self._products.improve(memory.pop("matrix"), _thin(value, rows, rank))
                memory = {**memory, "basis": basis}
                if self.error_feedback:
                    memory["residual"] = tf.reshape(remainder, context.shape)
                return _thin(own, columns, rank), memory
            case _:
                factor = value * (1.0 / context.size)
                basis, start = memory.pop("basis"), memory.pop("start")
                mean = tf.reshape(self._products.expand(basis, factor), context.shape)
                if not self.warm_start:
                    return mean, memory
                wide = _widen(factor, self.largest)
                alive = tf.reduce_any(wide != 0, 0, keepdims=True)
                return mean, {**memory, "q": tf.where(alive, wide, start)}


class _TensorflowProducts:
    """Operations on whole matrices `(rows, columns)`; factors have `rank` columns, at most `largest`."""

    def __init__(self, largest: int) -> None:
        self.largest = largest

    def project(
        self, gradient: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, factor: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Memory]:
        """Return M, `(rows, columns)`; its product with a factor `(columns, rank)`; and "finite" if M was checked."""
        corrected = gradient if residual is None else gradient + scale * residual
        matrix = tf.reshape(corrected, (-1, factor.shape[0]))
        return matrix, tf.matmul(matrix, factor), {}

    def improve(self, matrix: tf.Tensor, products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return P, `(rows, rank)`; M^T P, `(columns, rank)`; and M - P (M^T P)^T."""
        rank = products.shape[1] or tf.shape(products)[1]
        basis = orthonormal(_widen(products, self.largest))[:, :rank]
        # In this order XLA's product of a long matrix and a thin one is several times faster on a CPU.
        own = tf.transpose(tf.matmul(basis, matrix, transpose_a=True))
        return basis, own, matrix - self.expand(basis, own)

    def expand(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        """Return the product of `left` and the transposed `right`."""
        if left.shape[1] is None:
            return tf.matmul(left, right, transpose_b=True)
        # XLA fuses outer products with the operations on the result into one pass over memory.
        rows = tf.unstack(tf.transpose(right))
        return tf.add_n([column[:, None] * row for column, row in zip(tf.unstack(left, axis=1), rows, strict=True)])


class _NativeProducts:
    """`_TensorflowProducts` in C++."""

    def __init__(self, operations: Any) -> None:
        self.operations = operations

    def project(
        self, gradient: tf.Tensor, residual: tf.Tensor | None, scale: tf.Tensor, factor: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, Memory]:
        matrix, products, finite = self.operations.groundswell_project(
            gradient, kernels.or_nothing(residual), scale, factor
        )
        return matrix, products, {"finite": kernels.shaped(finite, ())}

    def improve(self, matrix: tf.Tensor, products: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        basis, own, remainder = self.operations.groundswell_improve(matrix, products)
        return basis, own, remainder

    def expand(self, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return self.operations.groundswell_expand(left, right)


def orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    """Return orthonormal columns with the same span, by Gram-Schmidt, twice; dependent columns become zero."""
    largest = tf.reduce_max(tf.abs(matrix), 0, keepdims=True)
    # Columns of unit length keep products of huge or tiny numbers in range.
    scaled = _unit(tf.math.divide_no_nan(matrix, largest), 0.0)
    columns = matrix.shape[1]

    def advance(index: tf.Tensor, basis: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        column = tf.gather(scaled, index, axis=1)[:, None]
        for _ in range(2):
            column -= tf.matmul(basis, tf.matmul(basis, column, transpose_a=True))
        return index + 1, basis + _unit(column, _RELATIVE_ZERO) * tf.one_hot(index, columns)

    # This is a loop: unrolled over the columns of every tensor of a model, XLA would compile for a minute.
    _, basis = tf.while_loop(lambda index, _: index < columns, advance, (0, tf.zeros_like(scaled)))
    return basis


def _unit(columns: tf.Tensor, zero: float) -> tf.Tensor:
    norm = tf.norm(columns, axis=0, keepdims=True)
    return tf.where(norm > zero, tf.math.divide_no_nan(columns, norm), tf.zeros_like(columns))


def _widen(factor: tf.Tensor, columns: int) -> tf.Tensor:
    wide = factor if factor.shape[1] == columns else tf.pad(factor, [[0, 0], [0, columns - tf.shape(factor)[1]]])
    return tf.ensure_shape(wide, (None, columns))


def _thin(factor: tf.Tensor, count: int, rank: int | tf.Tensor) -> tf.Tensor:
    return kernels.shaped(factor, (count, rank if isinstance(rank, int) else None))


def _matrix(shape: Shape) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]
