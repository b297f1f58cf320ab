"""What every section of the configuration is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A configuration section: immutable, no unknown keys, no silent coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
