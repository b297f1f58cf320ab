"""What every section of the configuration is."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A configuration section: immutable, no unknown keys, no silent coercion."""

    # A key's docstring is its description: `groundswell config --comments` and errors show it.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

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
        union: Of sections, with a discriminator.
        key: The discriminator.
    """
    members = get_args(get_args(union)[0]) if get_args(union) else (union,)
    return tuple(name for member in members for name in get_args(member.model_fields[key].annotation))
