"""Horovod's `DistributedOptimizer` for Keras 3: gradients are averaged over the ranks before they are applied."""

from types import ModuleType
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from pipelines.launch.keras_door.compiling import refuse_jit, say_jit_is_off
from pipelines.launch.keras_door.reduction import Reduction
from pipelines.launch.keras_door.repairs import version_of
from pipelines.launch.keras_door.variables import native


class DistributedApply:
    """Takes the place of one optimizer's `apply`, through which `fit` and `apply_gradients` hand it gradients.

    The optimizer keeps its class, and so its model is saved as one that needs no Horovod. With `passes` above 1 the
    gradients of so many calls are added first. The calls between leave the weights as they are.
    """

    def __init__(self, optimizer: Any, reduction: Reduction, passes: int, average_passes: bool) -> None:
        """Remember the optimizer.

        Args:
            optimizer: One of Keras 3.
            reduction: What makes the ranks' gradients one.
            passes: Number of calls whose gradients are added before they are averaged over the ranks.
            average_passes: Divide that sum by `passes`.
        """
        self.optimizer, self.reduction = optimizer, reduction
        self._passes, self._average_passes = passes, average_passes
        self._sums: list[Any] = []
        self._count: Any = None

    def __call__(self, grads: Any, trainable_variables: Any = None) -> None:
        """Average the gradients and apply them; the arguments are those of `keras.optimizers.Optimizer.apply`."""
        optimizer, gradients = self.optimizer, list(grads)
        if not gradients or (trainable_variables is None and not optimizer.built):
            type(optimizer).apply(optimizer, gradients, trainable_variables)  # nothing to do, or Keras's own error
            return
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        if self._passes == 1:
            self._update(gradients, variables)
        else:
            self._accumulate(gradients, variables)

    def _update(self, gradients: list[Any], variables: list[Any]) -> None:
        type(self.optimizer).apply(self.optimizer, self.reduction(gradients, variables), variables)

    def _accumulate(self, gradients: list[Any], variables: list[Any]) -> None:
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            if not self.reduction.sparse_as_dense:
                raise ValueError(
                    "backward_passes_per_step > 1 cannot add sparse gradients: pass sparse_as_dense=True as well"
                )
            gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
        if not self.optimizer.built:  # Keras creates no variables inside a branch
            self.optimizer.build(variables)
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
                self._sums = [
                    None if gradient is None else tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)
                    for gradient in gradients
                ]
        for total, gradient in zip(self._sums, gradients, strict=True):
            if total is not None:
                total.assign_add(gradient)
        tf.cond(self._count.assign_add(1) >= self._passes, lambda: self._flush(variables), self._skip)

    def _flush(self, variables: list[Any]) -> Any:
        divisor = self._passes if self._average_passes else 1
        self._update([None if total is None else total / divisor for total in self._sums], variables)
        for variable in filter(lambda total: total is not None, (*self._sums, self._count)):
            variable.assign(tf.zeros_like(variable))
        return True

    def _skip(self) -> Any:
        # As Horovod does: schedules of the learning rate count every call.
        getattr(self.optimizer, "inner_optimizer", self.optimizer).iterations.assign_add(1)
        return False


def distribution(optimizer: object) -> DistributedApply | None:
    """How an optimizer averages; None where it does not."""
    apply = getattr(optimizer, "__dict__", {}).get("apply")
    return apply if isinstance(apply, DistributedApply) else None


def distribute(
    keras: ModuleType,
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Any,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer of Keras 3 average over the ranks, and return it; the arguments are Horovod's.

    Differs from Horovod under Keras 2: the optimizer itself is changed, with the state that it has, and not a copy.
    All gradients of one type travel in one grouped operation unless `groups` says otherwise, so that a repeated run
    adds in the same order.

    Raises:
        TypeError: It is no optimizer of Keras 3.
        ValueError: It averages already, or a value is out of range.
        RuntimeError: Keras computes with another backend than TensorFlow.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer was given {type(optimizer).__module__}.{type(optimizer).__name__}, but needs an "
            f"optimizer of Keras {version_of(keras)}, such as keras.optimizers.SGD(0.01); for tf_keras set "
            "TF_USE_LEGACY_KERAS=1 and import horovod.tensorflow.keras"
        )
    if keras.config.backend() != "tensorflow":
        raise RuntimeError(
            f"Keras uses the backend {keras.config.backend()!r}, but Horovod's collectives are TensorFlow's: set "
            "KERAS_BACKEND=tensorflow"
        )
    if distribution(optimizer) is not None:
        raise ValueError(f"this {type(optimizer).__name__} is already a DistributedOptimizer: wrap it once")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: it must be 1 or more")
    reduction = Reduction(
        name=name or f"Distributed{type(optimizer).__name__}",
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    optimizer.apply = DistributedApply(optimizer, reduction, backward_passes_per_step, average_aggregated_gradients)
    optimizer.register_local_var = lambda variable: reduction.local.add(native(variable).ref())
    refuse_jit(keras)
    return optimizer


def average_scaled_gradients(optimizer: Any) -> None:
    """Where Keras has wrapped a distributed optimizer to scale its loss, let the wrapper average.

    It skips a step whose gradients overflow. The ranks would disagree on that, and then wait for each other for ever,
    if each looked at its own gradients before they are averaged.
    """
    inner: Any = getattr(optimizer, "inner_optimizer", None)
    apply = distribution(inner)
    if apply is not None:
        del inner.apply
        apply.optimizer, optimizer.apply = optimizer, apply


def load_distributed(
    keras: ModuleType,
    wrap_optimizer: Any,
    filepath: Any,
    custom_optimizers: Any,
    custom_objects: dict[str, Any] | None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer continues from its saved state and averages over the ranks.

    Raises:
        ValueError: `legacy_opts`, which Keras 3 does not have.
    """
    if legacy_opts:
        raise ValueError(f"legacy_opts=True, but Keras {version_of(keras)} has no legacy optimizers: leave it out")
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        wrap_optimizer(lambda: model.optimizer)()
        if model.jit_compile:
            model.jit_compile = False
            say_jit_is_off()
    return model
