"""The repair of Horovod for Keras 3 at the user's import; importing this module imports neither of them.

Horovod 0.28.1 was written for Keras 2. Under Keras 3, its `DistributedOptimizer` averages nothing and reports no error,
and its callbacks raise. Therefore a rank repairs each module of Horovod right after its import.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_REPAIRS = {
    "horovod.tensorflow.mpi_ops": "match_by_position",
    "horovod.tensorflow.functions": "accept_keras_variables",
    "horovod.tensorflow.elastic": "refuse_elastic",
    "horovod.tensorflow": "accept_keras_sources",
    "horovod._keras": "repair_optimizers",
    "horovod.keras.callbacks": "repair_callbacks",
    "horovod.tensorflow.keras.callbacks": "repair_callbacks",
    "horovod.tensorflow.keras": "repair_backend",
}
"""The function of `repairs` for each module."""


def install() -> None:
    """Repair these modules of Horovod: imported ones now, the others at their import."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name in filter(sys.modules.__contains__, _REPAIRS):
            _repair(sys.modules[name])


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REPAIRS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_repair(module: ModuleType) -> None:
                execute(module)
                _repair(module)

            spec.loader.exec_module = execute_and_repair  # type: ignore[method-assign]
        return spec


def _repair(module: ModuleType) -> None:
    repairs = importlib.import_module("pipelines.launch.keras_door.repairs")
    getattr(repairs, _REPAIRS[module.__name__])(module)
