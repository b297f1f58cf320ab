"""Objects by import path, without an import of TensorFlow."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def import_function(path: str, setting: str) -> Callable[..., Any]:
    """Import the object at an import path; only its module is imported, with the module's own imports.

    Args:
        path: Module and object, `package.module:object`; the object may be an attribute of a class.
        setting: Key of the configuration that holds the path, for the message.

    Raises:
        ValueError: The module does not exist or cannot be imported, or it has no such callable object.
    """
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{setting}={path}: {first_line(error)}; install the module where driver and workers run, add its folder "
            "to PYTHONPATH, or pass it with spark-submit --py-files"
        ) from error
    except Exception as error:  # the module's own code may raise any exception
        raise ValueError(f"{setting}={path}: importing {module_name} raised {described(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{setting}={path}: {module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{setting}={path}: {name} cannot be called, it is of type {type(found).__name__}")
    checked: Callable[..., Any] = found
    return checked


@contextmanager
def errors_of_function(subject: str) -> Iterator[None]:
    """Make an exception of an imported function, which is called inside, an error of one line.

    Args:
        subject: Setting and import path, for the message.

    Raises:
        ValueError: The function or the use of its result raised any exception.
    """
    try:
        yield
    except Exception as error:  # the function's own code may raise any exception
        raise ValueError(f"{subject}: the function raised {described(error)}") from error


def described(error: BaseException) -> str:
    """Return an exception of foreign code as a line."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, without a full stop."""
    return next(iter(str(error).strip().splitlines()), "").rstrip(".")
