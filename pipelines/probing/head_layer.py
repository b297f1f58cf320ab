"""Whether a `.keras` file has a head whose input a probe can take; found without TensorFlow."""

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
        uri: Names the model in the message.

    Raises:
        ValueError: It has none, or the file is damaged.
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
    """The units of all layers that `models.networks.features` takes for a head, those in nested models included."""
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
