"""What every section of the configuration is."""

from collections.abc import Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class Section(BaseModel):
    """A configuration section: immutable, no unknown keys, no silent coercion, finite numbers."""

    # A key's docstring is its description: `groundswell config --comments` and errors show it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which are validated with the rest; pydantic's own takes any value.

        Args:
            update: New values by key; nested sections are whole.
            deep: Whether nested values are copied too.

        Raises:
            ValueError: A value is of the wrong type or out of range, or there is no such key.
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
        """The default of a key, for code that has the same argument: a default is stated once."""
        return cls.model_fields[key].get_default(call_default_factory=True)


class Member(Section):
    """A section of which there are several kinds, such as a codec or an optimizer; `name` says which one.

    Its other keys are the keyword arguments of the constructor that has this name in a table of `models`. The defaults
    are stated here only: the constructors require every argument.
    """

    name: str

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the constructor of that name."""
        return self.model_dump(exclude={"name"})


def member_names(union: Any, key: str = "name") -> tuple[str, ...]:
    """The names of all members of a union, in its order; of a single member, its own.

    Args:
        union: A union of sections with a discriminator, or one section.
        key: The discriminator.
    """
    members = get_args(get_args(union)[0]) if get_args(union) else (union,)
    return tuple(name for member in members for name in get_args(member.model_fields[key].annotation))


def _line(problem: ErrorDetails) -> str:
    """What is wrong with a value, after its key."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return f"{'.'.join(map(str, problem['loc']))}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
