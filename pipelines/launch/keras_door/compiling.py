"""`compile` of Keras 3 for models whose optimizer averages: XLA cannot compile Horovod's collectives."""

import inspect
import logging
from functools import wraps
from types import ModuleType
from typing import Any

import horovod.tensorflow as hvd

_log = logging.getLogger(__name__)
_MARK = "_groundswell_refuses_jit"
_said = False


def refuse_jit(keras: ModuleType) -> None:
    """Let `Model.compile` turn `jit_compile="auto"` off where the optimizer averages, and refuse an explicit true."""
    owner: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    compile_model = owner.compile
    if hasattr(compile_model, _MARK):
        return
    signature = inspect.signature(compile_model)

    @wraps(compile_model)
    def compile_without_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        from pipelines.launch.keras_door.optimizer import average_scaled_gradients, distribution

        optimizer = args[0] if args else kwargs.get("optimizer")
        inner = getattr(optimizer, "inner_optimizer", None)  # of a loss scaler
        if distribution(optimizer) is None and distribution(inner) is None:
            return compile_model(self, *args, **kwargs)
        kwargs.pop("experimental_run_tf_function", None)  # Horovod's documents ask for it; without effect since TF 2.4
        bound = signature.bind(self, *args, **kwargs)
        wanted = bound.arguments.get("jit_compile", "auto")
        if wanted == "auto":
            say_jit_is_off()
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


def say_jit_is_off() -> None:
    """Log one line per job."""
    global _said
    if not _said and (not hvd.is_initialized() or hvd.rank() == 0):
        _log.info('jit_compile="auto" becomes False: XLA cannot compile Horovod\'s collectives')
    _said = True
