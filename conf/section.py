"""What every section of the configuration is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A configuration section: immutable, no unknown keys, no silent coercion."""

    # A key's docstring is its description: `groundswell config --comments` and errors show it.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
