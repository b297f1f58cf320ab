"""Replacements in Horovod's modules; `hook` calls these functions when the module has been imported."""

from collections.abc import Callable
from functools import wraps
from itertools import zip_longest
from types import ModuleType, SimpleNamespace
from typing import Any

import tensorflow as tf

from pipelines.launch.keras_door.keras_3 import is_keras_3, native, shared


def match_by_position(operations: ModuleType) -> None:
    """Let ranks match collectives without a name by their order in the graph, and not by the name of a variable.

    In Keras 3 this name is a path. It differs between a rank that has loaded a model and one that has built it.
    """
    broadcast = operations.broadcast_

    @wraps(broadcast)
    def broadcast_numbered(variables: Any, *args: Any, **kwargs: Any) -> Any:
        numbered = [
            SimpleNamespace(
                name=str(position),
                handle=variable.handle,
                read_value=variable.read_value,
                _should_act_as_resource_variable=True,
            )
            for position, variable in enumerate(variables)
        ]
        return broadcast(numbered, *args, **kwargs)

    operations.broadcast_ = broadcast_numbered  # type: ignore[attr-defined]
    # TensorFlow adds a number where a graph has several operations of one name.
    operations._normalize_name = lambda name: "by_position"  # type: ignore[attr-defined]


def accept_keras_variables(functions: ModuleType) -> None:
    """Let `hvd.broadcast_variables` take variables of Keras 3, and refuse lists that differ between the ranks."""
    broadcast_variables = functions.broadcast_variables

    @wraps(broadcast_variables)
    def broadcast(
        variables: Any, root_rank: int, process_set: Any = functions.global_process_set, inplace: bool = False
    ) -> Any:
        variables = shared(variables)
        with tf.init_scope():  # while a graph is traced, this is outside it
            if tf.executing_eagerly():
                own = functions.rank(), [f"{variable.dtype.name} {variable.shape}" for variable in variables]
                _check_layouts(dict(functions.allgather_object(own, process_set=process_set)), root_rank)
        return broadcast_variables(variables, root_rank, process_set, inplace)

    functions.broadcast_variables = broadcast  # type: ignore[attr-defined]


def _check_layouts(layouts: dict[int, list[str]], root_rank: int) -> None:
    """Raise the same ValueError on every rank if types or shapes differ: Horovod would wait forever."""
    for rank, layout in layouts.items():
        pairs = zip_longest(layout, layouts.get(root_rank, []), fillvalue="no variable")
        for position, (received, sent) in enumerate(pairs):
            if received != sent:
                raise ValueError(
                    f"broadcast_variables: at position {position} rank {rank} has {received}, but rank {root_rank}, "
                    f"which sends, has {sent}: every rank must have the same model and optimizer"
                )


def refuse_elastic(elastic: ModuleType) -> None:
    """Let all of `hvd.elastic` fail with one line that says what to use instead."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "horovod.elastic does not work here, because the number of ranks is fixed: save checkpoints, and let "
            "BarrierRunner(retries=2) start the ranks again"
        )

    elastic.run_fn = elastic.ObjectState.__new__ = refuse  # type: ignore[attr-defined]


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
