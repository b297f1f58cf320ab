"""Several micro-batches per optimizer step, in the memory of one."""

from collections.abc import Sequence

import keras
import tensorflow as tf


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """The moving batch-norm statistics: what training changes in a model beside its trainable variables.

    Those of frozen layers do not change, and neither do their weights, which are no trainable variables then.
    """
    # Keras has no public list of all layers, nested ones included.
    layers = model._flatten_layers()
    frozen = {id(variable) for layer in layers if not layer.trainable for variable in layer.variables}
    floats = [variable for variable in model.non_trainable_variables if "float" in str(variable.dtype)]
    return [variable for variable in floats if id(variable) not in frozen]


class Accumulation:
    """Sums what the micro-batches of one optimizer step give on this rank; part of the graphs of the training step.

        gradient = (g_1 + ... + g_k) / k,    loss = (l_1 + ... + l_k) / k
        statistics = (s_1 + ... + s_k) / k,  s_j the moving statistics after micro-batch j alone

    So k micro-batches on each of N ranks give what one batch on each of kN ranks gives: batch norm sees one micro-batch
    at a time, every micro-batch starts from the moving statistics before the step, and these move once per step. The
    sums take the memory of one float32 gradient, for any k, from the first micro-batch to the last one: while gradients
    are exchanged and applied they have none. What all takes together is in RESULTS.md (`make bench NAME=memory`).

    Source: the order of the samples is that of `pipelines.dataset.format.order.rank_parts`.
    """

    def __init__(self, model: keras.Model, micro_batches: int) -> None:
        """Create the sums.

        Args:
            model: The model whose trainable variables have the gradients.
            micro_batches: Number of micro-batches per optimizer step, k.
        """
        self.micro_batches = micro_batches
        self._statistics = [variable.value for variable in moving_statistics(model)]
        self._loss = tf.Variable(0.0, trainable=False, name="loss_sum")
        # Without a shape, so that they can be let go of between steps.
        self._gradients = [
            tf.Variable(_nothing(), trainable=False, shape=tf.TensorShape(None)) for _ in model.trainable_variables
        ]
        self._shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        self._has_gradients = tf.Variable(False, trainable=False, name="has_gradients")
        self._statistics_sums = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self._statistics]

    def statistics_before(self) -> list[tf.Tensor]:
        """The moving statistics, read before a micro-batch moves them."""
        return [variable.read_value() for variable in self._statistics]

    def add(self, loss: tf.Tensor, gradients: Sequence[tf.Tensor], before: Sequence[tf.Tensor]) -> None:
        """Take a micro-batch that is not the last of its step; with `mean`, any of them.

        Args:
            loss: Its mean loss.
            gradients: One float32 gradient per trainable variable.
            before: What `statistics_before` returned.
        """
        self._loss.assign_add(loss)

        def add() -> bool:
            for total, gradient in zip(self._gradients, gradients, strict=True):
                total.assign_add(gradient)
            return True

        def begin() -> bool:
            for total, gradient in zip(self._gradients, gradients, strict=True):
                total.assign(gradient)
            return True

        tf.cond(self._has_gradients, add, begin)
        self._has_gradients.assign(True)
        for total, statistic, start in zip(self._statistics_sums, self._statistics, before, strict=True):
            total.assign_add(statistic)
            statistic.assign(start)

    def finish(self, loss: tf.Tensor, gradients: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Take the last micro-batch of a step; return loss and gradients of the step, and begin again."""
        share = 1.0 / self.micro_batches
        for total, statistic in zip(self._statistics_sums, self._statistics, strict=True):
            statistic.assign((total + statistic) * share)
            total.assign(tf.zeros_like(total))
        mean = (self._loss + loss) * share
        self._loss.assign(0.0)
        if self.micro_batches == 1:
            return mean, list(gradients)
        means = [(total + gradient) * share for total, gradient in zip(self._sums(), gradients, strict=True)]
        self._let_go()
        return mean, means

    def put_back(self, before: Sequence[tf.Tensor]) -> None:
        """Undo what a forward pass has done to the moving statistics; `before` is as for `add`."""
        for statistic, start in zip(self._statistics, before, strict=True):
            statistic.assign(start)

    def mean(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return loss and gradients of a step whose micro-batches `add` took all, and begin again."""
        share = 1.0 / self.micro_batches
        for total, statistic in zip(self._statistics_sums, self._statistics, strict=True):
            statistic.assign(total * share)
            total.assign(tf.zeros_like(total))
        mean, means = self._loss * share, [total * share for total in self._sums()]
        self._loss.assign(0.0)
        self._let_go()
        return mean, means

    def reset(self) -> None:
        """Begin again, whatever an unfinished step has left; outside a graph."""
        self._loss.assign(0.0)
        for total in self._statistics_sums:
            total.assign(tf.zeros_like(total))
        self._let_go()

    def _sums(self) -> list[tf.Tensor]:
        """The sums of gradients after at least one micro-batch, in the shapes of the variables."""
        return [
            tf.ensure_shape(total.read_value(), shape)
            for total, shape in zip(self._gradients, self._shapes, strict=True)
        ]

    def _let_go(self) -> None:
        """Give the memory of the sums back."""
        for total in self._gradients:
            total.assign(_nothing())
        self._has_gradients.assign(False)


def _nothing() -> tf.Tensor:
    return tf.zeros((0,))
