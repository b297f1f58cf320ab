"""Replacements in Horovod's modules; `hook` calls these functions when the module has been imported."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from pipelines.launch.keras_door.keras_3 import is_keras_3, native, shared


def accept_keras_variables(functions: ModuleType) -> None:
    """Let `hvd.broadcast_variables` take variables of Keras 3."""
    broadcast_variables = functions.broadcast_variables

    @wraps(broadcast_variables)
    def broadcast(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return broadcast_variables(shared(variables), *args, **kwargs)

    functions.broadcast_variables = broadcast  # type: ignore[attr-defined]


def accept_keras_sources(horovod: ModuleType) -> None:
    """Let `hvd.DistributedGradientTape` take gradients by variables of Keras 3."""
    distributed_tape = horovod.DistributedGradientTape

    @wraps(distributed_tape)
    def tape_of(*args: Any, **kwargs: Any) -> Any:
        if isinstance(groups := kwargs.get("groups"), list):
            kwargs["groups"] = [[native(variable) for variable in group] for group in groups]
        tape = distributed_tape(*args, **kwargs)
        gradient, register = tape.gradient, tape.register_local_source

        def native_gradient(target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            return gradient(target, [native(source) for source in sources], *args, **kwargs)

        tape.gradient = native_gradient
        tape.register_local_source = lambda source: register(native(source))
        return tape

    horovod.DistributedGradientTape = tape_of  # type: ignore[attr-defined]


def repair_optimizers(implementation: ModuleType) -> None:
    """Let `hvd.DistributedOptimizer`, `hvd.PartialDistributedOptimizer` and `hvd.load_model` work with Keras 3."""
    for name, replacement in (("create_distributed_optimizer", "distribute"), ("load_model", "load_distributed")):
        setattr(implementation, name, _replaced_in_keras_3(getattr(implementation, name), replacement))


def _replaced_in_keras_3(original: Callable[..., Any], replacement: str) -> Callable[..., Any]:
    """Return a function that calls one of `optimizer` for Keras 3, and Horovod's own for tf_keras."""

    @wraps(original)
    def chosen(keras: ModuleType, *args: Any, **kwargs: Any) -> Any:
        if not is_keras_3(keras):
            return original(keras, *args, **kwargs)
        from pipelines.launch.keras_door import optimizer

        return getattr(optimizer, replacement)(keras, *args, **kwargs)

    return chosen


def repair_callbacks(callbacks: ModuleType) -> None:
    """Let the four callbacks work with the Keras that their module uses: 3, or tf_keras."""
    from pipelines.launch.keras_door.callbacks import CALLBACKS

    for name, behaviour in CALLBACKS.items():
        described = {"__module__": callbacks.__name__, "__doc__": behaviour.__doc__}
        setattr(callbacks, name, type(name, (behaviour, callbacks.keras.callbacks.Callback), described))


def repair_backend(horovod_keras: ModuleType) -> None:
    """Let Horovod's functions for tf_keras use its backend instead of that of Keras 3."""
    keras = horovod_keras.keras
    if not is_keras_3(keras):
        horovod_keras.K = keras.backend  # type: ignore[attr-defined]
