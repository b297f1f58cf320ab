"""Whether a model can score the samples of a dataset or archive."""

from typing import Any

import pytest

from pipelines.sample import ImageGroup
from pipelines.scoring.predict.model import ModelDescription, check_fits

INPUT = ImageGroup("rgb", (8, 8, 3), "uint8", ("red", "green", "blue"))
MODEL = ModelDescription("models:/land/3", "m-1", "3", "single_label", ("water", "land"), (INPUT,))
THEIRS: dict[str, Any] = {
    "where": "/data",
    "task": "single_label",
    "class_names": ("water", "land"),
    "groups": (INPUT,),
}


@pytest.mark.parametrize("further", [(), (ImageGroup("radar", (8, 8, 1), "float32", ("VV",)),)])
def test_the_same_fits(further: tuple[ImageGroup, ...]) -> None:
    assert check_fits(MODEL, **{**THEIRS, "groups": (*THEIRS["groups"], *further)}) is None


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"task": "multi_label"}, "^models:/land/3 is a single_label model, and /data is multi_label$"),
        (
            {"class_names": ("sea", "land", "ice")},
            r"^models:/land/3 knows 2 classes \(water, \.\.\.\), /data has 3 \(sea, \.\.\.\)",
        ),
        (
            {"class_names": ("land", "water")},
            "^class 1 of models:/land/3 is 'water', and that of /data is 'land'$",
        ),
        ({"class_names": ("water", "ice")}, "^class 2 of models:/land/3 is 'land', and that of /data is 'ice'$"),
    ],
)
def test_what_differs_is_named(theirs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fits(MODEL, **{**THEIRS, **theirs})
