"""Horovod's `DistributedOptimizer` for Keras 3: gradients are averaged over the ranks before they are applied."""

import inspect
import logging
from functools import cache, wraps
from types import ModuleType
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from pipelines.launch.keras_door.keras_3 import native, version_of
from pipelines.launch.keras_door.reduction import Reduction

_log = logging.getLogger(__name__)
_MARK = "_groundswell_refuses_jit"


class DistributedApply:
    """Replaces one optimizer's `apply`, which `fit` and `apply_gradients` call with the gradients.

    The optimizer keeps its class, so its saved model does not need Horovod. With `passes` above 1, the gradients of
    that number of calls are added first. The calls before the last one do not change the weights.
    """

    def __init__(self, optimizer: Any, reduction: Reduction, passes: int, average_passes: bool) -> None:
        """Store the optimizer.

        Args:
            optimizer: An optimizer of Keras 3.
            reduction: Reduction of the ranks' gradients.
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
            type(optimizer).apply(optimizer, gradients, trainable_variables)  # a no-op, or Keras's own error
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
        # Horovod does the same: schedules of the learning rate count every call.
        getattr(self.optimizer, "inner_optimizer", self.optimizer).iterations.assign_add(1)
        return False


def distribution(optimizer: object) -> DistributedApply | None:
    """Return how an optimizer averages; None if it does not."""
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

    Differs from Horovod under Keras 2: this changes the optimizer itself, with its state, and not a copy.
    Without `groups`, one grouped operation sends all gradients of one type, so that a repeated run adds in the same
    order.

    Raises:
        TypeError: The object is not an optimizer of Keras 3.
        ValueError: The optimizer already averages, or a value is out of range.
        RuntimeError: Keras uses another backend than TensorFlow.
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
    _refuse_jit(keras)
    return optimizer


def average_scaled_gradients(optimizer: Any) -> None:
    """Let Keras's loss scaler average if it wraps a distributed optimizer.

    The loss scaler skips a step whose gradients overflow. If each rank checked its own gradients before averaging, the
    ranks would disagree and then wait for each other forever.
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
        ValueError: `legacy_opts` is set, which Keras 3 does not have.
    """
    if legacy_opts:
        raise ValueError(f"legacy_opts=True, but Keras {version_of(keras)} has no legacy optimizers: leave it out")
    objects = {kind.__name__: kind for kind in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if getattr(model, "optimizer", None) is not None:
        wrap_optimizer(lambda: model.optimizer)()
        if model.jit_compile:
            model.jit_compile = False
            _say_jit_is_off()
    return model


def _refuse_jit(keras: ModuleType) -> None:
    """Make `Model.compile` turn off `jit_compile="auto"` if the optimizer averages, and refuse an explicit true.

    XLA cannot compile Horovod's collectives.
    """
    owner: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    compile_model = owner.compile
    if hasattr(compile_model, _MARK):
        return
    signature = inspect.signature(compile_model)

    @wraps(compile_model)
    def compile_without_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = args[0] if args else kwargs.get("optimizer")
        inner = getattr(optimizer, "inner_optimizer", None)  # the optimizer inside a loss scaler
        if distribution(optimizer) is None and distribution(inner) is None:
            return compile_model(self, *args, **kwargs)
        kwargs.pop("experimental_run_tf_function", None)  # Horovod's documentation asks for it; no effect since TF 2.4
        bound = signature.bind(self, *args, **kwargs)
        wanted = bound.arguments.get("jit_compile", "auto")
        if wanted == "auto":
            _say_jit_is_off()
        elif wanted:
            raise ValueError(
                f"jit_compile={wanted!r} with a DistributedOptimizer: XLA cannot compile Horovod's collectives; pass "
                "jit_compile=False or leave it out"
            )
        bound.arguments["jit_compile"] = False
        result = compile_model(*bound.args, **bound.kwargs)
        average_scaled_gradients(self.optimizer)
        return result

    setattr(compile_without_jit, _MARK, True)
    owner.compile = compile_without_jit


@cache
def _say_jit_is_off() -> None:
    """Log one line per job."""
    if not hvd.is_initialized() or hvd.rank() == 0:
        _log.info('jit_compile="auto" becomes False: XLA cannot compile Horovod\'s collectives')
