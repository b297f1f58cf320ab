"""The settings of parts from outside this project, which are named by an import path and imported when needed."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from conf.sections.section import Member

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _check_form(path: str) -> str:
    if not _FORM.fullmatch(path):
        raise PydanticCustomError("import_path", "should be package.module:object")
    return path


ImportPath = Annotated[str, AfterValidator(_check_form)]
"""Module and object, `package.module:object`. Only this module is imported, on driver and workers."""


class Imported(Member):
    """A part by import path. Every worker needs its module: installed, on PYTHONPATH, or with --py-files."""

    path: ImportPath
    """What to import, `package.module:object`; this runs the module's code on driver and workers."""
    settings: dict[str, Any] = Field(default={})
    """Keyword arguments of the imported object."""
