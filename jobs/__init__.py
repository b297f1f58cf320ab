"""The commands. Importing them finds out whether another folder hides a package of Groundswell with the same name."""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).parent.parent


def _check_packages() -> None:
    # Python looks in a notebook's folder first, and names like `conf` are common.
    for name in ("conf", "models", "pipelines"):
        spec, ours = find_spec(name), _ROOT / name / "__init__.py"
        if spec is not None and spec.origin is not None and Path(spec.origin).resolve() != ours.resolve():
            other = spec.origin.removesuffix("/__init__.py")
            raise ImportError(
                f"{other} hides Groundswell's package {name!r} ({ours.parent}): rename it, or start Python in a folder "
                "without it"
            )


_check_packages()
