import json
from pathlib import Path

import pytest

from pipelines.dataset.manifest import BandStatistics, Manifest, Shard, Split, read_manifest, write_manifest
from pipelines.sample import ImageGroup

MANIFEST = Manifest(
    archive="bigearthnet_v2",
    task="multi_label",
    class_names=("water", "land"),
    groups=(ImageGroup("bands_10m", (2, 2, 1), "uint16", ("B02",)),),
    splits={
        "train": Split(
            shards=(Shard(file="train/part-00000.parquet", row_groups=(3, 2), size=99),), class_counts=(4, 1)
        )
    },
    statistics={"bands_10m": BandStatistics(mean=(1.5,), std=(0.1,))},
    settings={"seed": 0},
    source_fingerprint="abc",
)


def test_round_trip(tmp_path: Path) -> None:
    write_manifest(MANIFEST, tmp_path)
    assert read_manifest(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["dataset.json"]


def test_rows_and_fingerprint() -> None:
    assert MANIFEST.splits["train"].rows == 5
    assert MANIFEST.fingerprint != MANIFEST.model_copy(update={"source_fingerprint": "abd"}).fingerprint


def test_a_folder_without_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="groundswell prepare"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}', "\xff"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"dataset\.json is damaged"):
        read_manifest(tmp_path)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    values = MANIFEST.model_dump(mode="json") | {"format_version": 2}
    (tmp_path / "dataset.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="format version 2"):
        read_manifest(tmp_path)


def test_band_names_must_match_the_shape() -> None:
    with pytest.raises(ValueError, match="2 band names"):
        ImageGroup("x", (2, 2, 1), "uint8", ("a", "b"))
