"""The import names of Databricks' sparkdl, over Groundswell's launcher; a real sparkdl comes first."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_others = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parents[1]]
_real = PathFinder.find_spec(__name__, _others)
if _real is not None and _real.loader is not None:
    _module = module_from_spec(_real)
    sys.modules[__name__] = _module  # what `import sparkdl` gives from here on
    _real.loader.exec_module(_module)
else:
    try:
        from pipelines.launch.horovod_runner import HorovodRunner
    except ModuleNotFoundError as error:
        if error.name != "pipelines":
            raise
        raise ModuleNotFoundError(
            "this sparkdl gives old names to Groundswell, which is not installed: install the file groundswell-*.whl",
            name=error.name,
        ) from None

    __all__ = ["HorovodRunner"]
