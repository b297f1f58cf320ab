import datetime
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipelines.archives.archive import REJECTED_SCHEMA, read_sample
from pipelines.archives.bigearthnet.nomenclature import BIGEARTHNET_19, BIGEARTHNET_43
from pipelines.archives.bigearthnet.v1 import BigEarthNetV1
from pipelines.archives.bigearthnet.v1_metadata import CLOUD_LIST, NO_19_LIST, SNOW_LIST
from tests.pipelines.archives.files import check_patch, check_refused, reasons, valid_index

PRODUCT = "S2A_MSIL1C_20170613T093020_N0205_R022_T33UUP_20170613T101608.SAFE"
SCENE = "S2A_MSIL2A_20170613T93020"
LABELS = {
    f"{SCENE}_0_1": ["Non-irrigated arable land", "Rice fields", "Pastures"],
    f"{SCENE}_0_2": ["Sea and ocean", "Airports"],
    f"{SCENE}_0_3": ["Discontinuous urban fabric"],
    f"{SCENE}_10_3": ["Airports"],
    f"{SCENE}_11_3": ["Peatbogs"],
}
SPLIT_OF = dict(zip(LABELS, ("train", "train", "val", "test", "test"), strict=True))


@pytest.fixture
def v1(generated: Path, tmp_path: Path) -> Path:
    """Five patches in the layout of v1.0, with invented pixels."""
    root, sources = tmp_path / "v1", sorted(generated.glob("BigEarthNet-S2/*/*"))
    for (name, labels), source in zip(LABELS.items(), sources, strict=False):
        folder = root / "BigEarthNet-v1.0" / name
        folder.mkdir(parents=True)
        for path in source.iterdir():
            shutil.copy(path, folder / f"{name}_{path.name.rsplit('_', 1)[1]}")
        write_labels(root, name, labels)
    (root / "splits").mkdir()
    for split in ("train", "val", "test"):
        write_list(root, split, *(name for name in LABELS if SPLIT_OF[name] == split))
    return root


def write_labels(root: Path, name: str, labels: list[str]) -> None:
    values = {"labels": labels, "acquisition_date": "2017-06-13 09:30:20", "tile_source": PRODUCT}
    (root / "BigEarthNet-v1.0" / name / f"{name}_labels_metadata.json").write_text(json.dumps(values))


def write_list(root: Path, name: str, *patches: str) -> None:
    (root / "splits" / f"{name}.csv").write_bytes("".join(f"{patch}\r\n" for patch in patches).encode())


def unusable(archive: BigEarthNetV1) -> list[tuple[str, str]]:
    return reasons(archive.index().unusable.to_pylist())


def test_the_index_of_nineteen_classes(v1: Path) -> None:
    archive = BigEarthNetV1(str(v1))
    assert archive.description.class_names == BIGEARTHNET_19
    index = valid_index(archive)
    assert index.rejected.schema.equals(REJECTED_SCHEMA)
    labels: list[list[int]] = [[1, 15], [11], [18], [], [9]]
    assert (index.samples.to_pylist(), len(index.rejected)) == (
        [
            {
                "id": name,
                "split": {"val": "validation"}.get(SPLIT_OF[name], SPLIT_OF[name]),
                "labels": indices,
                "paths": [f"BigEarthNet-v1.0/{name}"],
                "size": None,
                "country": None,
                "season": "summer",
                "tile": None if name == f"{SCENE}_10_3" else "33UUP",
                "acquisition_date": datetime.date(2017, 6, 13),
                "flags": None,
            }
            for name, indices in zip(LABELS, labels, strict=True)
        ],
        0,
    )
    file = f"{v1}/BigEarthNet-v1.0/{SCENE}_10_3/{SCENE}_10_3_labels_metadata.json"
    assert index.unusable.to_pylist() == [
        {"id": f"{SCENE}_10_3", "file": file, "reason": "no labels", "detail": "of those that count: Airports"}
    ]


def test_the_index_of_all_classes(v1: Path) -> None:
    archive = BigEarthNetV1(str(v1), nomenclature=43)
    assert archive.description.class_names == BIGEARTHNET_43
    index = archive.index()
    assert len(index.rejected) == 0
    for row in index.samples.to_pylist():
        assert ({BIGEARTHNET_43[label] for label in row["labels"]}, row["labels"]) == (
            set(LABELS[row["id"]]),
            sorted(row["labels"]),
        )


def test_patches_without_a_class_are_known(v1: Path) -> None:
    write_list(v1, NO_19_LIST, f"{SCENE}_10_3")
    assert (unusable(BigEarthNetV1(str(v1))), unusable(BigEarthNetV1(str(v1), include_flagged=True))) == (
        [],
        [(f"{SCENE}_10_3", "no labels")],
    )
    assert f"{SCENE}_10_3" in BigEarthNetV1(str(v1), nomenclature=43).index().samples["id"].to_pylist()


@pytest.mark.parametrize("name", [CLOUD_LIST, SNOW_LIST])
def test_clouds_and_snow_are_left_out_by_default(v1: Path, name: str) -> None:
    write_list(v1, name, f"{SCENE}_0_1", f"{SCENE}_99_99")
    for include, expected in ((False, list(LABELS)[1:]), (True, list(LABELS))):
        archive = BigEarthNetV1(str(v1), nomenclature=43, include_flagged=include)
        assert archive.index().samples["id"].to_pylist() == expected


def test_patches_in_no_split_are_left_out(v1: Path) -> None:
    write_list(v1, "test")
    index = BigEarthNetV1(str(v1)).index()
    assert (index.samples["id"].to_pylist(), len(index.rejected)) == (list(LABELS)[:3], 0)


def test_listed_patches_that_are_not_there(v1: Path) -> None:
    write_list(v1, "test", f"{SCENE}_77_77")
    missing, folder = BigEarthNetV1(str(v1)).index(), f"{v1}/BigEarthNet-v1.0/{SCENE}_77_77"
    assert missing.unusable.to_pylist() == [
        {"id": f"{SCENE}_77_77", "file": folder, "reason": "missing folder", "detail": ""}
    ]
    subset = BigEarthNetV1(str(v1), subset=True).index()
    assert (len(subset.unusable), subset.samples.to_pylist()) == (
        0,
        [row for row in missing.samples.to_pylist() if row["labels"]],
    )


def test_no_patch_at_all(v1: Path) -> None:
    shutil.rmtree(v1 / "BigEarthNet-v1.0")
    for subset in (False, True):
        check_refused(BigEarthNetV1(str(v1), subset=subset), r"none of the 5 patches of .*splits exists")


def test_missing_folders_are_named(tmp_path: Path) -> None:
    check_refused(BigEarthNetV1(str(tmp_path / "absent")), "absent: no such folder", FileNotFoundError)
    check_refused(BigEarthNetV1(str(tmp_path)), r"splits: no train\.csv", FileNotFoundError)


def test_patches_directly_in_the_root_and_splits_elsewhere(v1: Path, tmp_path: Path) -> None:
    usual, bare = BigEarthNetV1(str(v1)), BigEarthNetV1(str(v1 / "BigEarthNet-v1.0"), splits=str(v1 / "splits"))
    assert bare.index().samples["paths"].to_pylist() == [[name] for name in usual.index().samples["id"].to_pylist()]
    for name in LABELS:
        np.testing.assert_equal(read_sample(bare, [name]), read_sample(usual, [f"BigEarthNet-v1.0/{name}"]))


def test_bad_records_of_every_kind_stop_nobody(v1: Path, tmp_path: Path) -> None:
    names, images = list(LABELS), v1 / "BigEarthNet-v1.0"
    (images / names[0] / f"{names[0]}_labels_metadata.json").write_text("{")
    write_labels(v1, names[1], ["Forest"])
    (images / names[2]).rename(tmp_path / "outside")
    (images / names[2]).symlink_to(tmp_path / "outside")
    (images / names[3] / f"{names[3]}_labels_metadata.json").unlink()
    write_list(v1, "test", names[3], names[4], names[0], "../../etc")
    archive = BigEarthNetV1(str(v1))
    assert (archive.index().samples["id"].to_pylist(), archive.index().samples["labels"].to_pylist()) == (
        names,
        [[], [], [], [], [9]],
    )
    assert (reasons(archive.index().rejected.to_pylist()), unusable(archive)) == (
        [("../../etc", "malformed id"), (names[0], "repeated id")],
        [
            (names[0], "malformed JSON"),
            (names[1], "unknown label"),
            (names[2], "symbolic link"),
            (names[3], "missing file"),
        ],
    )


def test_images_that_lead_out_of_the_archive_are_refused(v1: Path, tmp_path: Path) -> None:
    (v1 / "BigEarthNet-v1.0").rename(tmp_path / "outside")
    (v1 / "BigEarthNet-v1.0").symlink_to(tmp_path / "outside")
    check_refused(BigEarthNetV1(str(v1)), r"BigEarthNet-v1\.0: a symbolic link out of the archive")


def test_the_index_stays_behind_when_it_travels(v1: Path) -> None:
    archive = BigEarthNetV1(str(v1), nomenclature=43, subset=True)
    light = pickle.dumps(archive)
    archive.index()
    assert (len(pickle.dumps(archive)), pickle.loads(light)) == (len(light), archive)
    assert pickle.loads(light).index().samples.equals(archive.index().samples)


def test_an_unknown_number_of_classes() -> None:
    with pytest.raises(ValueError, match="nomenclature is 20, expected 19 or 43"):
        BigEarthNetV1("/archive", nomenclature=20)


def test_real_patches_read_as_rasterio_reads_them(shared_data: Path) -> None:
    every = BigEarthNetV1(str(shared_data / "bigearthnet_v1"), subset=True)
    index = every.index()
    assert len(index.samples) + len(index.rejected) == 6
    assert set(index.rejected["reason"].to_pylist()) <= {"no labels"}
    for paths in [*index.samples["paths"].to_pylist()] * 2:  # the second time without GDAL
        check_patch(every, paths)


def test_real_labels_come_back(shared_data: Path) -> None:
    root = shared_data / "bigearthnet_v1"
    for row in BigEarthNetV1(str(root), nomenclature=43, subset=True).index().samples.to_pylist():
        published = json.loads((root / row["paths"][0] / f"{row['id']}_labels_metadata.json").read_text())
        assert {BIGEARTHNET_43[label] for label in row["labels"]} == set(published["labels"])
