"""The exchange of parts: every rank gets its part of the mean gradient, and later the updated parts of all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from models.compression.arithmetic.graph import checked_means, means_finite, now
from models.compression.exchange.exchange import GradientExchange, check_present
from models.compression.exchange.figures import TimedPart
from models.compression.exchange.wire import ScatteringCollective


def part_of(elements: int, rank: int, size: int) -> tuple[int, int]:
    """Return where a rank's part of the elements begins and ends; the first `elements % size` ranks get one more.

    This is the division of Horovod's reducescatter.
    """
    each, more = divmod(elements, size)
    return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)


class ShardExchange:
    """Averages gradients over N ranks; each rank gets and updates an N-th of them.

        each bucket:   its gradients one after the other, cut into N parts of equal length (to one element)
        `exchange`:    part r of the mean goes to rank r       (reducescatter)
        `gather`:      all parts of the weights go to all ranks   (allgather)

    A part may begin and end inside a variable. Each rank then has a range of the variable's elements in row-major
    order; the range may be empty. Both operations together send the bytes of one allreduce.

    Every rank sees only its part of the means. So a sum of 4 bytes per variable says whether the parts of all ranks are
    finite. No rank has that sum before every rank has all its parts: either all ranks begin an update, or none.
    """

    def __init__(self, exchange: GradientExchange, collective: ScatteringCollective, variables: Sequence[Any]) -> None:
        """Divide the variables.

        Args:
            exchange: The exchange of these ranks with the codec `none`, which provides buckets, checks and figures.
            collective: The operations of all ranks together.
            variables: The trainable variables of the model, in the order of the gradients.
        """
        assert not exchange.codec.collectives, "parts of gradients travel without compression"
        exchange.build(variables)
        self._exchange, self._collective = exchange, collective
        self._shapes = [tuple(variable.shape) for variable in variables]
        self._elements = [math.prod(shape) for shape in self._shapes]
        self._buckets = exchange.dense_buckets
        self.ranges: list[tuple[int, int]] = [(0, 0)] * len(variables)
        """Start and stop of this rank's range of elements of each variable."""
        for bucket in self._buckets:
            start, stop = part_of(sum(self._elements[index] for index in bucket), collective.rank, collective.size)
            for index in bucket:
                elements = self._elements[index]
                self.ranges[index] = min(max(start, 0), elements), min(max(stop, 0), elements)
                start, stop = start - elements, stop - elements

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def exchange(self, gradients: Sequence[tf.Tensor], learning_rate: Any = None) -> list[tf.Tensor]:
        """Return this rank's ranges of the means over ranks, one tensor `(elements,)` per gradient.

        Raises:
            ValueError: a gradient that is None.
            tf.errors.InvalidArgumentError: gradients or means that are not finite, as `GradientExchange.exchange`.
        """
        check_present(gradients)
        exchange, size = self._exchange, self._collective.size
        exchange.begin_figures(4 * sum(self._elements) + 4 * len(self._elements))
        factor = tf.constant(1.0 / size)
        means: dict[int, tf.Tensor] = {}
        for number, indexes in enumerate(self._buckets):
            values = [tf.cast(gradients[index], tf.float32) for index in indexes]
            started = now(values)
            with tf.control_dependencies([exchange.check_own(exchange.all_finite(values), indexes)]):
                joined = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
            part = self._collective.reducescatter(joined, f"gradients_shard{number}")
            lengths = [stop - start for start, stop in (self.ranges[index] for index in indexes)]
            part = tf.ensure_shape(part, [sum(lengths)])
            exchange.count(TimedPart.WIRE, started, now([part]), f"parts of bucket {number}", indexes)
            part = part * factor if size > 1 else part
            means |= dict(zip(indexes, tf.split(part, lengths), strict=True))
        return self._checked([means[index] for index in range(len(means))])

    def _checked(self, means: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the means, after a check that the means of all ranks are finite."""
        step = self._exchange.clock["step"]
        not_finite = tf.cast(tf.logical_not(means_finite(means)), tf.float32)
        (ranks,) = self._collective.allreduce([not_finite], "gradients_not_finite")
        checked = checked_means(means, ranks < 0.5, self._exchange.names, self._exchange.codec.name, step.read_value())
        step.assign_add(1)
        return checked

    def sum(self, values: tf.Tensor, name: str) -> tf.Tensor:
        """Return the sums of a few numbers `(n,)` over the ranks, under a name that is the same on all of them."""
        (sums,) = self._collective.allreduce([values], name)
        self._exchange.add_payload(4 * values.shape.num_elements())
        return sums

    def gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the whole tensors, in the shapes of the variables, from the ranges of all ranks.

        Args:
            parts: This rank's range of each variable, `(elements,)`.
        """
        wholes: dict[int, tf.Tensor] = {}
        for number, indexes in enumerate(self._buckets):
            joined = tf.concat([parts[index] for index in indexes], 0)
            started = now([joined])
            whole = self._collective.allgather(joined, f"weights_shard{number}")
            whole = tf.ensure_shape(whole, [sum(self._elements[index] for index in indexes)])
            if self._exchange.marks is not None:
                names = [self._exchange.names[index] for index in indexes]
                self._exchange.marks.add("wire", f"weights of bucket {number}", started, now([whole]), names)
            pieces = tf.split(whole, [self._elements[index] for index in indexes])
            wholes |= {
                index: tf.reshape(each, self._shapes[index]) for index, each in zip(indexes, pieces, strict=True)
            }
        return [wholes[index] for index in range(len(wholes))]
