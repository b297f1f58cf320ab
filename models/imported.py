"""Objects by import path; imports no TensorFlow itself."""

import importlib
from collections.abc import Callable
from typing import Any


def import_function(path: str, setting: str) -> Callable[..., Any]:
    """Import what an import path names; nothing else is imported but what this module imports itself.

    Args:
        path: Module and object, `package.module:object`; the object may be an attribute of a class.
        setting: Key of the configuration that holds the path, for the message.

    Raises:
        ValueError: There is no such module, it cannot be imported, or it has no such object to call.
    """
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{setting}={path}: {first_line(error)}; install the module where driver and workers run, add its folder "
            "to PYTHONPATH, or pass it with spark-submit --py-files"
        ) from error
    except Exception as error:  # whatever the module's own code raises
        raise ValueError(f"{setting}={path}: importing {module_name} raised {described(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{setting}={path}: {module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{setting}={path}: {name} cannot be called, it is of type {type(found).__name__}")
    checked: Callable[..., Any] = found
    return checked


def described(error: BaseException) -> str:
    """An exception of somebody else's code in a line."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, without a full stop."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")
