import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.archives.archive import REJECTED_SCHEMA, ArchiveDescription, read_sample
from pipelines.archives.images.image_folder import ImageFolder
from pipelines.sample import ImageGroup
from tests.pipelines.archives.files import check_bad_record, check_refused, fill, reasons, valid_index

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def image(path: Path, height: int = 8, width: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(len(str(path))).integers(0, 256, (height, width, 3), np.uint8)).save(path)


def images(root: Path, counts: dict[str, int]) -> Path:
    for folder, count in counts.items():
        for number in range(count):
            image(root / folder / f"{number:03d}.png")
    return root


def splits_of(archive: ImageFolder) -> dict[str, str]:
    samples = archive.index().samples
    return dict(zip(samples["id"].to_pylist(), samples["split"].to_pylist(), strict=True))


def counts_of(archive: ImageFolder) -> dict[tuple[str, int], int]:
    return dict(Counter((row["split"], row["labels"][0]) for row in archive.index().samples.to_pylist()))


@pytest.fixture(scope="module")
def cifar10(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 30 images of each class and split."""
    root = tmp_path_factory.mktemp("images")
    with zipfile.ZipFile(shared_data / "cifar10.zip") as archive:
        archive.extractall(root, [name for name in archive.namelist() if int(Path(name).stem) < 30])
    return root / "cifar10"


def test_cifar10(cifar10: Path) -> None:
    archive, group = ImageFolder(str(cifar10)), ImageGroup("rgb", (32, 32, 3), "uint8", ("red", "green", "blue"))
    assert archive.description == ArchiveDescription("image_folder", "single_label", CIFAR10_CLASSES, (group,))
    index = valid_index(archive)
    assert index.rejected.equals(REJECTED_SCHEMA.empty_table())
    assert counts_of(archive) == {
        (split, label): count
        for split, count in (("train", 27), ("validation", 3), ("test", 30))
        for label in range(10)
    }
    for row in index.samples.to_pylist()[::13]:
        assert (row["paths"], CIFAR10_CLASSES[row["labels"][0]]) == ([row["id"]], row["id"].split("/")[1])
        with Image.open(cifar10 / row["id"]) as source:
            np.testing.assert_array_equal(read_sample(archive, row["paths"])["rgb"], np.asarray(source))


def test_splits_of_folders_are_kept(tmp_path: Path) -> None:
    archive = ImageFolder(str(images(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 3, "test/b": 1})))
    assert (counts_of(archive), splits_of(archive)["val/a/000.png"]) == (
        {("train", 0): 2, ("train", 1): 2, ("validation", 0): 3, ("test", 1): 1},
        "validation",
    )
    (tmp_path / "test/a").mkdir()  # a class without test images
    assert counts_of(ImageFolder(str(tmp_path))) == counts_of(archive)


def test_validation_is_drawn_from_train_by_class(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 20, "train/b": 4, "test/a": 2})
    archive = ImageFolder(str(tmp_path), validation_fraction=0.25, seed=1)
    expected = {("train", 0): 15, ("validation", 0): 5, ("train", 1): 3, ("validation", 1): 1, ("test", 0): 2}
    assert counts_of(archive) == expected
    other_seed = ImageFolder(str(tmp_path), validation_fraction=0.25, seed=2)
    assert counts_of(other_seed) == expected
    assert splits_of(other_seed) != splits_of(archive)
    assert splits_of(ImageFolder(str(tmp_path), validation_fraction=0.25, seed=1)) == splits_of(archive)
    none = ImageFolder(str(tmp_path), validation_fraction=0)
    assert counts_of(none) == {("train", 0): 20, ("train", 1): 4, ("test", 0): 2}


def test_classes_without_splits_are_divided(tmp_path: Path) -> None:
    images(tmp_path, {"a": 10, "b": 3})
    archive = ImageFolder(str(tmp_path), split_fractions=[0.6, 0.2, 0.2])
    assert archive.description.class_names == ("a", "b")
    assert counts_of(archive) == {
        ("train", 0): 6, ("validation", 0): 2, ("test", 0): 2, ("train", 1): 1, ("validation", 1): 1, ("test", 1): 1
    }  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "settings"),
    [
        ({"a": 3}, {"validation_fraction": 0.5}),
        ({"train/a": 3}, {"split_fractions": (0.8, 0.1, 0.1)}),
        ({"train/a": 3, "val/a": 1}, {"validation_fraction": 0.5}),
        ({"train/a": 3, "val/a": 1}, {"seed": 5}),
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path: Path, counts: dict[str, int], settings: dict[str, Any]) -> None:
    archive = ImageFolder(str(images(tmp_path, counts)), **settings)
    check_refused(archive, f"^{next(iter(settings))}=.* has no effect on {tmp_path}: it has ")


def test_what_is_no_image_is_rejected(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 1, "train/a/deep": 1})
    root = fill(tmp_path, "train/a/Thumbs.db", "train/a/a.gif", "train/a/.DS_Store", "train/a/upper.PNG")
    index = ImageFolder(str(root), validation_fraction=0).index()
    assert index.samples["id"].to_pylist() == ["train/a/000.png", "train/a/upper.PNG"]
    assert index.rejected.schema.equals(REJECTED_SCHEMA)
    assert reasons(index.rejected.to_pylist()) == [
        ("train/a/Thumbs.db", "not an image file"),
        ("train/a/a.gif", "not an image file"),
        ("train/a/deep", "nested folder"),
    ]


@pytest.mark.parametrize("folder", ["train/b", "val"])
def test_links_to_folders_out_of_the_archive_are_refused(tmp_path: Path, folder: str) -> None:
    """A class, or a split that would be drawn from the others instead, is many samples."""
    images(tmp_path / "archive", {"train/a": 2})
    images(tmp_path / "elsewhere", {"b": 1})
    link = tmp_path / "archive" / folder
    link.symlink_to(tmp_path / "elsewhere")
    check_refused(
        ImageFolder(str(tmp_path / "archive"), validation_fraction=0),
        rf"^{link}: a symbolic link to .*/elsewhere, out of the archive: move",
    )


def test_the_size_of_most_images_is_the_size_of_all(tmp_path: Path) -> None:
    fill(tmp_path, "a/0.png", content=b"damaged")
    image(tmp_path / "a" / "00.png", 1, 1)
    for number in range(1, 4):
        image(tmp_path / "a" / f"{number}.png", 5, 7)
    image(tmp_path / "b" / "0.png", 7, 5)
    archive = ImageFolder(str(tmp_path))
    assert (archive.description.groups[0].shape, read_sample(archive, ["a/1.png"])["rgb"].shape) == (
        (5, 7, 3),
        (5, 7, 3),
    )
    for path, message in (
        ("b/0.png", r"wrong size \(\(7, 5\) pixels"),
        ("a/00.png", r"wrong size \(\(1, 1\) pixels"),
        ("a/0.png", "not a readable JPEG or PNG"),
    ):
        check_bad_record(archive, [path], message)
    assert read_sample(ImageFolder(str(tmp_path), image_size=4), ["b/0.png"])["rgb"].shape == (4, 4, 3)


def test_images_of_many_sizes_need_the_setting(tmp_path: Path) -> None:
    for number in range(40):
        image(tmp_path / "a" / f"{number}.png", 4, 5 + number % 2)
        image(tmp_path / "b" / f"{number}.png", 4 + number % 3, 5)
    with pytest.raises(ValueError, match=r"different sizes \(4 x 5, .* pixels, \.\.\.\): set archive\.image_size"):
        _ = ImageFolder(str(tmp_path)).description
    assert ImageFolder(str(tmp_path), image_size=4).description.groups[0].shape == (4, 4, 3)


def test_images_of_which_none_can_be_read(tmp_path: Path) -> None:
    check_refused(ImageFolder(str(fill(tmp_path, "a/0.png", content=b"damaged"))), "none of 1 images can be read")


def test_a_class_without_training_images(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 1, "test/a": 1})
    (tmp_path / "train/b").mkdir()
    check_refused(ImageFolder(str(tmp_path)), "1 class folders hold no images, the first is 'train/b';")
    fill(tmp_path, "train/b/x.webp", "train/b/c/y.png")
    message = r"the first is 'train/b', which has 2 others \(train/b/x\.webp: not an image file\)"
    check_refused(ImageFolder(str(tmp_path)), message)


def test_a_class_may_be_spelt_in_two_ways_in_two_splits(tmp_path: Path) -> None:
    """A zip file from macOS beside one from Linux."""
    archive = ImageFolder(str(images(tmp_path, {"train/Caf\xe9": 2, "train/tea": 1, "val/Cafe\u0301": 1})))
    assert (archive.description.class_names, counts_of(archive)) == (
        ("Caf\xe9", "tea"),
        {("train", 0): 2, ("train", 1): 1, ("validation", 0): 1},
    )


def test_fractions_that_are_none() -> None:
    with pytest.raises(ValueError, match="split_fractions is"):
        ImageFolder("/archive", split_fractions=(1.0,))


def test_a_missing_archive(tmp_path: Path) -> None:
    for name in ("absent", "file"):
        with pytest.raises(
            FileNotFoundError, match=f"{name}: no such folder, expected the archive with its class fold"
        ):
            ImageFolder(str(fill(tmp_path, "file") / name)).index()


def test_an_executor_gets_the_description_and_not_the_list_of_files(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 200})
    archive = ImageFolder(str(tmp_path))
    archive.index()
    travelled = pickle.dumps(archive)
    assert len(travelled) < 1500
    for path in tmp_path.rglob("1*.png"):
        path.unlink()
    copy = pickle.loads(travelled)
    assert ((copy, copy.description), len(copy.index().samples)) == ((archive, archive.description), 100)
