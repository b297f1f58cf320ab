"""The sums of several micro-batches per optimizer step, in the memory of one."""

from collections.abc import Sequence

import keras
import tensorflow as tf


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Return the moving batch-norm statistics, which training changes in addition to the trainable variables.

    Frozen layers are left out: neither their statistics nor their weights change.
    """
    # Keras has no public list of all layers that includes nested ones.
    layers = model._flatten_layers()
    frozen = {id(variable) for layer in layers if not layer.trainable for variable in layer.variables}
    return [
        variable
        for variable in model.non_trainable_variables
        if "float" in str(variable.dtype) and id(variable) not in frozen
    ]


class Accumulation:
    """Sums gradients, losses and statistics of a step's micro-batches on this rank; part of the step's graphs.

        gradient = (g_1 + ... + g_k) / k,    loss = (l_1 + ... + l_k) / k
        statistics = (s_1 + ... + s_k) / k,  s_j the moving statistics after micro-batch j alone

    So k micro-batches on each of N ranks equal one batch on each of kN ranks. Batch norm sees one micro-batch at a
    time. Every micro-batch starts from the moving statistics before the step, which change once per step. The sums take
    the memory of one float32 gradient, for any k, from the first to the last micro-batch. They take no memory while
    gradients are exchanged and applied. RESULTS.md has the total memory (`make bench NAME=memory`).

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
        # Without a shape, so that their memory can be freed between steps.
        self._gradients = [
            tf.Variable(tf.zeros((0,)), trainable=False, shape=tf.TensorShape(None)) for _ in model.trainable_variables
        ]
        self._shapes = [tuple(variable.shape) for variable in model.trainable_variables]
        self._has_gradients = tf.Variable(False, trainable=False, name="has_gradients")
        self._statistics_sums = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self._statistics]

    def statistics_before(self) -> list[tf.Tensor]:
        """Return the moving statistics before a micro-batch changes them."""
        return [variable.read_value() for variable in self._statistics]

    def add(self, loss: tf.Tensor, gradients: Sequence[tf.Tensor], before: Sequence[tf.Tensor]) -> None:
        """Add a micro-batch that is not the last of its step; with `mean`, add all micro-batches.

        Args:
            loss: Its mean loss.
            gradients: Its gradients, one float32 tensor per trainable variable.
            before: The result of `statistics_before`.
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
        """Add the last micro-batch of a step, return loss and gradients of the step, and reset the sums."""
        if self.micro_batches == 1:
            return loss, list(gradients)
        sums = [total + gradient for total, gradient in zip(self._sums(), gradients, strict=True)]
        statistics = [
            total + statistic for total, statistic in zip(self._statistics_sums, self._statistics, strict=True)
        ]
        return self._means(self._loss + loss, sums, statistics)

    def put_back(self, before: Sequence[tf.Tensor]) -> None:
        """Undo the change of the moving statistics by a forward pass; for `before` see `add`."""
        for statistic, start in zip(self._statistics, before, strict=True):
            statistic.assign(start)

    def mean(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return loss and gradients of a step after `add` of all its micro-batches, and reset the sums."""
        return self._means(
            self._loss.read_value(), self._sums(), [total.read_value() for total in self._statistics_sums]
        )

    def _means(
        self, loss: tf.Tensor, gradients: Sequence[tf.Tensor], statistics: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Divide the sums of a step by the number of micro-batches, set the moving statistics, and reset the sums."""
        share = 1.0 / self.micro_batches
        for variable, total in zip(self._statistics, statistics, strict=True):
            variable.assign(total * share)
        means = [gradient * share for gradient in gradients]
        self.reset()
        return loss * share, means

    def reset(self) -> None:
        """Discard the sums of the step."""
        self._loss.assign(0.0)
        self._has_gradients.assign(False)
        for total in self._statistics_sums:
            total.assign(tf.zeros_like(total))
        for total in self._gradients:
            total.assign(tf.zeros((0,)))  # frees their memory

    def _sums(self) -> list[tf.Tensor]:
        """Return the sums of gradients after at least one micro-batch, in the shapes of the variables."""
        return [
            tf.ensure_shape(total.read_value(), shape)
            for total, shape in zip(self._gradients, self._shapes, strict=True)
        ]
