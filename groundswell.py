"""Groundswell for notebooks and scripts.

    import groundswell

    config = groundswell.load("demo", training={"epochs": 3})
    groundswell.prepare(config)
    trained = groundswell.train(config)
    groundswell.evaluate(config, trained.model_uri)
    groundswell.probe(config, trained.model_uri)  # a linear head on its frozen features
    groundswell.score(config, trained.model_uri, "/data/patches", "/data/predictions")
    groundswell.compare("groundswell").plot()  # the trainings of an experiment

Each name is imported at its first use, so that this import is fast. If a package that a name needs (Spark, TensorFlow,
Horovod) is not installed, the error is one line.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conf.load import override
    from jobs.compare import compare
    from jobs.evaluate import evaluate
    from jobs.prepare import prepare
    from jobs.probe import probe
    from jobs.score import score
    from jobs.shell.paths import load
    from jobs.train import train
    from pipelines.launch.horovod_runner import HorovodRunner
    from pipelines.launch.runner import BarrierRunner

__all__ = [
    "BarrierRunner",
    "HorovodRunner",
    "compare",
    "evaluate",
    "load",
    "override",
    "prepare",
    "probe",
    "score",
    "train",
]

_WHERE = {
    "load": "jobs.shell.paths",
    "override": "conf.load",
    "prepare": "jobs.prepare",
    "train": "jobs.train",
    "evaluate": "jobs.evaluate",
    "probe": "jobs.probe",
    "score": "jobs.score",
    "compare": "jobs.compare",
    "BarrierRunner": "pipelines.launch.runner",
    "HorovodRunner": "pipelines.launch.horovod_runner",
}


def check_packages() -> None:
    """Check that no folder or file of the user hides one of Groundswell's packages.

    Python looks in a notebook's folder first, and names like `conf` and `models` are common.

    Raises:
        ImportError: A folder or file hides a package; the message names both.
    """
    for name in ("conf", "jobs", "models", "pipelines"):
        spec, ours = find_spec(name), Path(__file__).with_name(name) / "__init__.py"
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != ours.resolve():
            other = spec.origin.removesuffix("/__init__.py")
            raise ImportError(
                f"{other} hides Groundswell's package {name!r} ({ours.parent}): rename it, or start Python in a folder "
                "without it"
            )


def __getattr__(name: str) -> Any:
    """Import one of the names of `__all__`.

    Raises:
        AttributeError: There is no such name.
        MissingPackageError: A package that the name needs is not installed; the message says how to install it.
    """
    if name not in _WHERE:
        raise AttributeError(f"module 'groundswell' has no attribute {name!r}; it has {', '.join(__all__)}")
    from jobs.shell.notebook import quieten_libraries
    from jobs.shell.verbs import VERBS
    from pipelines.machine.packages import SPARK, require

    runner = name.endswith("Runner")
    require(f"groundswell.{name}", SPARK if runner else VERBS[name].needs if name in VERBS else ())
    quieten_libraries()
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "check_packages"]


check_packages()
