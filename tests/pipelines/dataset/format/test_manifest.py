import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.dataset.format.manifest import (
    BandStatistics,
    Manifest,
    Shard,
    Split,
    manifest_json,
    read_manifest,
    write_manifest,
)
from pipelines.sample import ImageGroup

MANIFEST = Manifest(
    archive="bigearthnet_v2",
    task="multi_label",
    class_names=("water", "land"),
    groups=(ImageGroup("bands_10m", (2, 2, 1), "uint16", ("B02",)),),
    splits={
        "train": Split(
            shards=(Shard(file="train/part-00000.parquet", row_groups=(3, 2), size=99, content_digest="0f"),),
            class_counts=(4, 1),
        )
    },
    statistics={"bands_10m": BandStatistics(mean=(1.5,), std=(0.1,))},
    settings={"seed": 0},
    read_settings={},
    source_fingerprint="abc",
)


def with_digest(values: dict[str, Any]) -> str:
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return json.dumps({**values, "digest": hashlib.sha256(canonical.encode()).hexdigest()})


def check_refused(folder: Path, text: str, message: str) -> None:
    """Make sure that a manifest with this text is refused."""
    (folder / "dataset.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=message):
        read_manifest(folder)


def test_round_trip(tmp_path: Path) -> None:
    write_manifest(MANIFEST, tmp_path)
    assert (read_manifest(tmp_path), [path.name for path in tmp_path.iterdir()]) == (MANIFEST, ["dataset.json"])


def test_a_notebook_shows_classes_groups_and_splits() -> None:
    shown = MANIFEST._repr_html_()
    assert "bigearthnet_v2: 2 classes (multi_label), bands_10m (2, 2, 1) uint16" in shown
    assert "<th>train</th><td>5 rows</td><td>1 shards</td>" in shown


def test_rows_and_fingerprint() -> None:
    assert MANIFEST.splits["train"].rows == 5
    assert MANIFEST.fingerprint != MANIFEST.model_copy(update={"source_fingerprint": "abd"}).fingerprint


def test_a_folder_without_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="groundswell prepare"):
        read_manifest(tmp_path)


DEEP = ["[" * 200_000, '{"format_version":' + "[" * 50_000 + "]" * 50_000 + "}"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", with_digest({"format_version": 2}), "\xff", *DEEP], ids=len)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    check_refused(tmp_path, text, r"dataset\.json is damaged")


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_version_is_refused(tmp_path: Path, version: int) -> None:
    message = rf"format version {version}, this program reads 2: remove the dataset and run `groundswell prepare` again"
    check_refused(tmp_path, json.dumps(MANIFEST.model_dump(mode="json") | {"format_version": version}), message)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    values = MANIFEST.model_dump(mode="json") | {"licence": "CC BY"}
    values["splits"]["train"]["shards"][0]["rows_by_class"] = [3, 2]
    (tmp_path / "dataset.json").write_text(with_digest(values))
    assert read_manifest(tmp_path) == MANIFEST


def test_the_digest_is_one_that_others_can_compute(tmp_path: Path) -> None:
    write_manifest(MANIFEST, tmp_path)
    values = json.loads((tmp_path / "dataset.json").read_text())
    digest = values.pop("digest")
    assert json.loads(with_digest(values))["digest"] == digest
    del values["read_settings"]
    assert json.loads(with_digest(values))["digest"] == MANIFEST.fingerprint


def test_runs_know_a_dataset_by_its_content_and_not_by_what_is_noted_of_its_archive(tmp_path: Path) -> None:
    noted = MANIFEST.model_copy(update={"read_settings": {"image_side": 2}})
    assert noted.fingerprint == MANIFEST.fingerprint
    assert MANIFEST.model_copy(update={"settings": {"seed": 1}}).fingerprint != MANIFEST.fingerprint
    write_manifest(noted, tmp_path)
    assert read_manifest(tmp_path).fingerprint == MANIFEST.fingerprint
    text = (tmp_path / "dataset.json").read_text()
    check_refused(tmp_path, text.replace('"image_side": 2', '"image_side": 3'), "was changed after it was written")


def test_layout_of_the_text_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(
        json.dumps(dict(reversed(json.loads(manifest_json(MANIFEST)).items())), indent=7)
    )
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("name", "value"),
    [("class_names", ["land", "water"]), ("digest", "0" * 64), ("digest", None), ("note", "hello")],
)
def test_a_manifest_that_was_changed_by_hand_is_refused(tmp_path: Path, name: str, value: object) -> None:
    text = json.dumps(json.loads(manifest_json(MANIFEST)) | {name: value})
    check_refused(tmp_path, text, r"dataset\.json was changed after it was written.*restore the file, or remove")


@pytest.mark.parametrize("file", ["/etc/passwd", "../other/part-0.parquet", "train/../../x", "s3://other/x", ""])
def test_shards_stay_inside_the_dataset(tmp_path: Path, file: str) -> None:
    values = MANIFEST.model_dump(mode="json")
    values["splits"]["train"]["shards"][0]["file"] = file
    check_refused(tmp_path, with_digest(values), r"must be a path inside the dataset")


def test_a_shard_is_listed_once() -> None:
    values = MANIFEST.model_dump(mode="json")
    values["splits"]["train"]["shards"] *= 2
    with pytest.raises(ValueError, match=r"'train/part-00000.parquet' is listed 2 times"):
        Manifest.model_validate_json(json.dumps(values))


def test_band_names_must_match_the_shape() -> None:
    with pytest.raises(ValueError, match="2 band names"):
        ImageGroup("x", (2, 2, 1), "uint8", ("a", "b"))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("splits/train/shards/0/row_groups", [2**62]),
        ("splits/train/shards/0/row_groups", [-5]),
        ("splits/train/shards/0/size", -1),
        ("splits/train/class_counts", [-1, 2]),
        ("splits/../x", {"shards": [], "class_counts": [0, 0]}),
        ("splits/a\0b", {"shards": [], "class_counts": [0, 0]}),
        ("groups/0/shape", [10**6, 10**6, 1]),
        ("groups/0/shape", [-2, -2, 1]),
    ],
)
def test_numbers_and_names_that_no_dataset_has_are_refused(
    tmp_path: Path, changed: Callable[..., dict[str, Any]], path: str, value: Any
) -> None:
    values = {name: part for name, part in json.loads(manifest_json(MANIFEST)).items() if name != "digest"}
    name = path.removeprefix("splits/")
    hostile = {**values, "splits": {name: value}} if isinstance(value, dict) else changed(values, path, value)
    check_refused(tmp_path, with_digest(hostile), r"dataset\.json is damaged: ")
