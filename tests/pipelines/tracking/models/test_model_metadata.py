from typing import Any

import pytest

from pipelines.tracking.models.model_metadata import ModelMetadata, SplitSamples

EVERYTHING = ModelMetadata(
    class_names=("sea", "land"),
    task="multi_label",
    groups={"s2_10m": ("B02", "B03")},
    bands=("B02", "B03"),
    thresholds=(0.25, 0.75),
    archive="bigearthnet_v2",
    dataset_fingerprint="0123",
    source_fingerprint="4567",
    samples={"train": SplitSamples(3, (2, 1))},
    network={"name": "resnet", "depth": 50},
    ema=0.999,
    optimizer_steps=8,
    run_id="89ab",
)


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (EVERYTHING.as_json(), EVERYTHING),
        (ModelMetadata(("x",)).as_json(), ModelMetadata(("x",))),
        ({**EVERYTHING.as_json(), "colour": "blue"}, EVERYTHING),  # a key of a later version is left out
        ({"samples": 100, "groups": "a", "run_id": "89ab"}, ModelMetadata(run_id="89ab")),  # not ours: the run only
    ],
)
def test_metadata_is_the_same_after_a_store_had_it(stored: dict[str, Any], found: ModelMetadata) -> None:
    assert ModelMetadata.from_json(stored) == found


def test_a_value_of_another_type_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^the metadata of the model cannot be used: optimizer_steps: [^\n]+$"):
        ModelMetadata.from_json({"class_names": ["a"], "optimizer_steps": "many"})
