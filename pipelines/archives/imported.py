"""A user's own archive, imported by its path."""

from collections.abc import Mapping
from typing import Any

from conf.sections.archives import ImportedArchiveConfig
from models.imported import described, import_function
from pipelines.archives.archive import Archive

_NO_SETTINGS = ImportedArchiveConfig.default("settings")
_PROTOCOL = ("root", "description", "index", "read_settings", "read")


def imported_archive(*, path: str, settings: Mapping[str, Any] = _NO_SETTINGS) -> Archive:
    """Call a user's class or function, which returns an archive (`pipelines.archives.archive.Archive`).

    Executors receive the archive pickled, so they need its module too.

    Args:
        path: Import path, `package.module:object`.
        settings: Keyword arguments of the call.

    Raises:
        ValueError: The object is not found, raises an exception, or returns something that lacks a part of an archive.
    """
    constructor = import_function(path, "archive.path")
    try:
        archive: Archive = constructor(**settings)
    except Exception as error:  # any error of the user's code
        raise ValueError(f"archive.path={path}: it raised {described(error)}") from error
    missing = [name for name in _PROTOCOL if not hasattr(type(archive), name) and not hasattr(archive, name)]
    if missing:
        raise ValueError(
            f"archive.path={path}: it returned a {type(archive).__name__}, which has no {', '.join(missing)}: see "
            "pipelines.archives.archive.Archive"
        )
    return archive
