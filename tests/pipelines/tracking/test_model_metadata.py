from pipelines.tracking.model_metadata import ModelMetadata, SplitSamples

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


def test_metadata_is_the_same_after_a_store_had_it() -> None:
    assert ModelMetadata.from_json(EVERYTHING.as_json()) == EVERYTHING
    assert ModelMetadata.from_json(ModelMetadata(("x",)).as_json()) == ModelMetadata(("x",))


def test_keys_of_a_later_version_are_left_out() -> None:
    assert ModelMetadata.from_json({**EVERYTHING.as_json(), "colour": "blue"}) == EVERYTHING


def test_metadata_that_is_not_ours_says_the_run_only() -> None:
    assert ModelMetadata.from_json({"samples": 100, "groups": "a", "run_id": "89ab"}) == ModelMetadata(run_id="89ab")
