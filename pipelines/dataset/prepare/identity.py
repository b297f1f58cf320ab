"""What decides the rows of a dataset: two calls with the same identity write the same dataset."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pipelines.archives.archive import ArchiveDescription

Value = int | str | list[str] | None
_INDEX = "index"


@dataclass(frozen=True)
class Identity:
    """Settings, classes and images of a dataset, and the samples of which it is made."""

    settings: Mapping[str, Value]
    """Values by names that a message can show."""
    index: str | None = None
    """Digest of the samples; None: unknown."""

    @classmethod
    def from_json(cls, values: Mapping[str, Value]) -> "Identity":
        """Read what `as_json` gave.

        Raises:
            TypeError: The digest of the samples is no text.
        """
        index = values.get(_INDEX)
        if index is not None and not isinstance(index, str):
            raise TypeError(f"{_INDEX} must be a text, got {index!r}")
        return cls({name: value for name, value in values.items() if name != _INDEX}, index)

    def as_json(self) -> dict[str, Value]:
        """Return the settings, with the digest of the samples among them where it is known."""
        return {**self.settings} if self.index is None else {**self.settings, _INDEX: self.index}

    def differences(self, wanted: "Identity") -> list[str]:
        """Name the settings that differ; one that is unknown here is no difference."""
        return [
            f"{name} {self.settings[name]} there, {value} asked for"
            for name, value in wanted.settings.items()
            if self.settings.get(name, value) != value
        ]


def describe(description: ArchiveDescription, read_settings: Mapping[str, int | str | None]) -> dict[str, Value]:
    """Give what decides the rows beside the samples, in words that a message can name: kind, classes, images."""
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
