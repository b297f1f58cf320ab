import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import rasterio
from PIL import Image

from pipelines.archives.archive import read_sample
from pipelines.archives.images.eurosat import BANDS, CLASSES, EuroSATMultispectral, EuroSATRGB
from tests.pipelines.archives.files import check_bad_record, check_refused, fill, reasons, valid_index


def files(root: Path, counts: dict[str, int], suffix: str = "tif") -> str:
    """Class folders of files that are no images."""
    for name in counts:
        (root / name).mkdir(parents=True)
    return str(
        fill(root, *[f"{name}/{name}_{number}.{suffix}" for name in counts for number in range(1, counts[name] + 1)])
    )


def test_the_real_multispectral_patches(shared_data: Path) -> None:
    root = shared_data / "eurosat" / "EuroSAT_MS"
    archive = EuroSATMultispectral(str(root))
    index = valid_index(archive)
    assert index.rejected.num_rows == 0
    # One file of a class is too few for any split but train.
    assert index.samples.select(["id", "split", "labels", "paths", "size"]).to_pylist() == [
        {
            "id": path,
            "split": "train",
            "labels": [CLASSES.index(path.split("/")[0])],
            "paths": [path],
            "size": (root / path).stat().st_size,
        }
        for path in ("AnnualCrop/AnnualCrop_1.tif", "Pasture/Pasture_300.tif")
    ]
    for path in index.samples["id"].to_pylist():
        with rasterio.open(root / path) as source:
            expected = source.read()
        image = read_sample(archive, [path])["bands"]
        assert image.shape == (64, 64, 13)
        np.testing.assert_array_equal(np.moveaxis(image, -1, 0), expected)


def test_the_order_of_bands_is_that_of_the_real_files(shared_data: Path) -> None:
    """The cirrus band is dark, and the two near infrared bands are nearly one: only with B8A last."""
    archive = EuroSATMultispectral(str(shared_data / "eurosat" / "EuroSAT_MS"))
    for path in archive.index().samples["id"].to_pylist():
        mean = dict(zip(BANDS, read_sample(archive, [path])["bands"].mean(axis=(0, 1)), strict=True))
        assert max(mean, key=lambda band: -mean[band]) == "B10"
        assert mean["B10"] < 20
        assert abs(mean["B8A"] / mean["B08"] - 1) < 0.2
        assert mean["B09"] < mean["B08"] / 2  # water vapour absorbs


def test_the_real_rgb_patches(shared_data: Path) -> None:
    root = shared_data / "eurosat" / "EuroSAT_RGB"
    archive = EuroSATRGB(str(root))
    assert archive.index().samples["id"].to_pylist() == ["AnnualCrop/AnnualCrop_1.jpg", "Pasture/Pasture_300.jpg"]
    for path in archive.index().samples["id"].to_pylist():
        with Image.open(root / path) as image:
            np.testing.assert_array_equal(read_sample(archive, [path])["rgb"], np.asarray(image))


def test_both_variants_have_the_ten_classes_and_are_divided_alike(tmp_path: Path) -> None:
    counts = {"Forest": 40, "River": 20, "SeaLake": 3}
    multispectral = EuroSATMultispectral(files(tmp_path / "ms", counts), seed=4)
    rgb = EuroSATRGB(files(tmp_path / "rgb", counts, "jpg"), seed=4)
    assert [
        (description.kind, description.task, description.class_names)
        for description in (multispectral.description, rgb.description)
    ] == [(kind, "single_label", CLASSES) for kind in ("eurosat_ms", "eurosat_rgb")]
    assert (list(CLASSES), len(CLASSES)) == (sorted(set(CLASSES)), 10)
    samples, others = multispectral.index().samples, rgb.index().samples
    assert samples.select(["split", "labels"]).equals(others.select(["split", "labels"]))
    assert Counter((CLASSES[row["labels"][0]], row["split"]) for row in samples.to_pylist()) == {
        ("Forest", "train"): 28, ("Forest", "validation"): 6, ("Forest", "test"): 6,
        ("River", "train"): 14, ("River", "validation"): 3, ("River", "test"): 3,
        ("SeaLake", "train"): 1, ("SeaLake", "validation"): 1, ("SeaLake", "test"): 1,
    }  # fmt: skip
    assert not EuroSATMultispectral(str(tmp_path / "ms"), seed=5).index().samples["split"].equals(samples["split"])


def test_files_that_are_no_patch_of_their_class_are_rejected(tmp_path: Path) -> None:
    others = ["Forest_1.tif.aux.xml", "River_3.tif", "Forest_x.tif", "forest_4.tif", ".Forest_5.tif", "Forest_7.TIF"]
    root = fill(tmp_path, *(f"Forest/{name}" for name in others), "Forest_9.tif", "label_map.json", "Forest/deep/x")
    fill(root, "Forest/Forest_1.tif", "Forest/Forest_2.tif")
    (root / "Forest" / "Forest_6.tif").symlink_to("/etc/hostname")
    index = EuroSATMultispectral(str(root)).index()
    assert (index.samples["id"].to_pylist(), dict(reasons(index.rejected.to_pylist()))) == (
        [
            "Forest/Forest_1.tif",
            "Forest/Forest_2.tif",
            "Forest/Forest_7.TIF",
        ],
        {
            "Forest_9.tif": "not in a class folder",
            "Forest/Forest_6.tif": "symbolic link",
            "Forest/Forest_1.tif.aux.xml": "not an image file",
            "Forest/Forest_x.tif": "name does not fit its class folder",
            "Forest/River_3.tif": "name does not fit its class folder",
            "Forest/forest_4.tif": "name does not fit its class folder",
            "Forest/deep": "nested folder",
        },
    )


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"Forest": 1, "Lake": 1}, "holds a folder 'Lake', expected the class folders AnnualCrop, Forest, "),
        ({"EuroSAT_MS/Forest": 0}, "holds a folder 'EuroSAT_MS', expected the class folders"),
        ({}, "holds no folders, expected the class folders"),
        ({"Forest": 1, "River": 0}, "1 class folders hold no images, the first is 'River'"),
    ],
)
def test_other_folders(tmp_path: Path, counts: dict[str, int], message: str) -> None:
    check_refused(EuroSATMultispectral(files(tmp_path, counts)), message)


def test_a_missing_archive_and_settings_out_of_range(tmp_path: Path) -> None:
    check_refused(EuroSATRGB(str(tmp_path / "absent")), "absent", FileNotFoundError)
    with pytest.raises(ValueError, match="split_fractions is"):
        EuroSATRGB("/archive", split_fractions=(0.5, 0.1, 0.1))


def test_an_executor_does_not_get_the_list_of_files(tmp_path: Path) -> None:
    archive = EuroSATMultispectral(files(tmp_path, {"Forest": 300}), split_fractions=[0.8, 0.1, 0.1])
    archive.index()
    copy = pickle.loads(pickle.dumps(archive))
    assert len(pickle.dumps(archive)) < 500
    assert copy == archive
    assert copy.index().samples.equals(archive.index().samples)


def test_an_rgb_patch_of_another_size(tmp_path: Path) -> None:
    (tmp_path / "Forest").mkdir()
    Image.new("RGB", (64, 32)).save(tmp_path / "Forest" / "Forest_1.jpg")
    check_bad_record(EuroSATRGB(str(tmp_path)), ["Forest/Forest_1.jpg"], "wrong size")
