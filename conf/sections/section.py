"""The base classes of the sections of the configuration, and of parts that users name by an import path."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class Section(BaseModel):
    """A configuration section: immutable, no unknown keys, no silent coercion, finite numbers."""

    # A key's docstring is its description: `groundswell config --comments` and errors show it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a validated copy with other values; pydantic's own method does not validate.

        Args:
            update: New values by key; a nested section is replaced as a whole.
            deep: Whether nested values are copied too.

        Raises:
            ValueError: A value has the wrong type or is out of range, or a key does not exist.
        """
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        values = {key: getattr(copied, key) for key in copied.model_fields_set}
        try:
            return self.model_validate({**values, **update})
        except ValidationError as error:
            raise ValueError(f"{type(self).__name__}: {'; '.join(map(_line, error.errors()))}") from None

    @classmethod
    def default(cls, key: str) -> Any:
        """Return the default of a key, for code with the same argument: a default is stated once."""
        return cls.model_fields[key].get_default(call_default_factory=True)


class NamedSection(Section):
    """A section that has several kinds, such as a codec or an optimizer; `name` says which one.

    The other keys are the keyword arguments of the constructor that has this name in a table of `models`. Only these
    classes state defaults: the constructors require every argument.
    """

    name: str

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the constructor of that name."""
        return self.model_dump(exclude={"name"})


def value_at(config: Section, key: str) -> Any:
    """Return the value of a key; None: the chosen sections have no such key."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name, None)
    return found


def choice_at(config: Section, key: str) -> Any:
    """Return the value of a key, or the name of the section that the key chooses."""
    value = value_at(config, key)
    return value.name if isinstance(value, NamedSection) else value


def refuse(*problems: tuple[object, str]) -> None:
    """Raise an error for the first problem that exists.

    Args:
        problems: Pairs of a condition, which is true if the problem exists, and the message.

    Raises:
        ValueError: A problem exists.
    """
    for exists, message in problems:
        if exists:
            raise ValueError(message)


def member_names(union: Any, key: str = "name") -> tuple[str, ...]:
    """Return the names of all members of a union, in its order, or the name of a single section.

    Args:
        union: A union of sections with a discriminator, or one section.
        key: The discriminator.
    """
    members = get_args(get_args(union)[0]) if get_args(union) else (union,)
    return tuple(name for member in members for name in get_args(member.model_fields[key].annotation))


def _line(problem: ErrorDetails) -> str:
    """Return the message of a problem, with the key and its value."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{'.'.join(map(str, problem['loc']))}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _check_form(path: str) -> str:
    if not _FORM.fullmatch(path):
        raise PydanticCustomError("import_path", "should be package.module:object")
    return path


ImportPath = Annotated[str, AfterValidator(_check_form)]
"""Module and object, `package.module:object`. Only this module is imported, on driver and workers."""


class Imported(NamedSection):
    """A part by import path. Every worker needs its module: installed, on PYTHONPATH, or with --py-files."""

    name: Literal["import"] = "import"
    path: ImportPath
    """What to import, `package.module:object`; this runs the module's code on driver and workers."""
    settings: dict[str, Any] = Field(default={})
    """Keyword arguments of the imported object."""
