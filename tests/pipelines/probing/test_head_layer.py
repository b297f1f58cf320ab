"""Which models have a head that a probe can take; see also `tests/models/networks/test_features.py`."""

import io
import json
import re
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.probing.extract import Extractor, check_head
from pipelines.storage.folder import Location

CLASSES = 5


def keras_file(*layers: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        nested = {"class_name": "Functional", "config": {"layers": list(layers)}}
        archive.writestr("config.json", json.dumps({"class_name": "Functional", "config": {"layers": [nested]}}))
    return stream.getvalue()


def convolution(**config: Any) -> dict[str, Any]:
    return {
        "class_name": "Conv2D",
        "config": {"filters": CLASSES, "kernel_size": [1, 1], "data_format": "channels_last", **config},
    }


@pytest.mark.parametrize("layer", [{"class_name": "Dense", "config": {"units": CLASSES}}, convolution()])
def test_a_dense_layer_and_a_convolution_of_one_pixel_are_heads(layer: dict[str, Any]) -> None:
    check_head(keras_file({"class_name": "Flatten", "config": {}}, layer), CLASSES, "runs:/1/model")


@pytest.mark.parametrize(
    "layer",
    [
        {"class_name": "Dense", "config": {"units": CLASSES + 1}},
        convolution(filters=CLASSES + 1),
        convolution(kernel_size=[3, 3]),
        convolution(data_format="channels_first"),
    ],
)
def test_other_layers_are_none(layer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"runs:/1/model has no dense layer with 5 units.* no such convolution"):
        check_head(keras_file(layer), CLASSES, "runs:/1/model")


def test_a_folder_that_an_executor_does_not_see_is_named(tmp_path: Path) -> None:
    extractor = Extractor(None, Location.at(tmp_path / "none"))  # type: ignore[arg-type]
    found = extractor.extract(SimpleNamespace(file="train-0.parquet"))
    assert found.file is None
    assert re.search("does not see .*set probe.output to a folder on storage that all hosts mount", found.problem)
