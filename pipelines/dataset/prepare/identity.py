"""The values that decide the rows of a dataset: two calls with the same identity write the same dataset."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.archives.archive import ArchiveDescription
from pipelines.storage.inventory import differences

Value = int | str | list[str] | None
_INDEX = "index"


@dataclass(frozen=True)
class Identity:
    """Settings, classes and images of a dataset, and a digest of its samples."""

    settings: Mapping[str, Value]
    """Settings by names that messages show."""
    index: str | None = None
    """Digest of the samples; None: unknown."""

    @classmethod
    def from_json(cls, values: Mapping[str, Value]) -> "Identity":
        """Read the result of `as_json`.

        Raises:
            TypeError: The digest of the samples is not a string.
        """
        index = values.get(_INDEX)
        if index is not None and not isinstance(index, str):
            raise TypeError(f"{_INDEX} must be a text, got {index!r}")
        return cls({name: value for name, value in values.items() if name != _INDEX}, index)

    def as_json(self) -> dict[str, Value]:
        """Return the settings, and the digest of the samples where it is known."""
        return {**self.settings} if self.index is None else {**self.settings, _INDEX: self.index}

    def differences(self, wanted: "Identity") -> list[str]:
        """Name the settings that differ; a setting that is unknown here does not count."""
        return differences({**wanted.settings, **self.settings}, wanted.settings)


def describe(description: ArchiveDescription, read_settings: Mapping[str, int | str | None]) -> dict[str, Value]:
    """Return the kind, classes and images, which decide the rows together with the samples, under readable names."""
    names = json.dumps([description.task, *description.class_names]).encode()
    return {
        "archive": description.kind,
        **read_settings,
        "classes": f"{len(description.class_names)} ({hashlib.sha256(names).hexdigest()[:8]})",
        "images": [
            f"{group.name} {'x'.join(map(str, group.shape))} {group.dtype} {','.join(group.bands)}"
            for group in description.groups
        ],
    }
