"""The check that a `.keras` file has a head for a probe; it needs no TensorFlow."""

import io
import json
import zipfile
from collections.abc import Iterator
from typing import Any

_CONFIG = "config.json"


def check_head(file: bytes, classes: int, uri: str) -> None:
    """Make sure that a model has a dense layer, or a convolution of one pixel, with one unit for each of its classes.

    Args:
        file: Content of the `.keras` file.
        classes: Number of the model's classes.
        uri: URI of the model, for the message.

    Raises:
        ValueError: The model has no such layer, or the file is damaged.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            described = json.loads(archive.read(_CONFIG))
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{uri}: its .keras file is damaged ({error})") from None
    if classes not in _units(described):
        raise ValueError(
            f"{uri} has no dense layer with {classes} units, one for each of its classes, and no such convolution of "
            "one pixel: the features of a probe are the input of such a layer"
        )


def _units(value: Any) -> Iterator[int]:
    """Yield the units of all layers that `models.networks.features` accepts as a head, also in nested models."""
    if isinstance(value, dict):
        kind, config = value.get("class_name"), value.get("config") or {}
        if kind == "Dense":
            yield int(config["units"])
        elif kind == "Conv2D" and config["data_format"] == "channels_last" and list(config["kernel_size"]) == [1, 1]:
            yield int(config["filters"])
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _units(each)
