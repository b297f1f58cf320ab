import pickle
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA, BadRecordError, read_sample
from pipelines.archives.image_folder import ImageFolder

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def image(path: Path, height: int = 8, width: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(len(str(path))).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(values).save(path)


def images(root: Path, counts: dict[str, int]) -> Path:
    for folder, count in counts.items():
        for number in range(count):
            image(root / folder / f"{number:03d}.png")
    return root


def splits_of(archive: ImageFolder) -> dict[str, str]:
    samples = archive.index().samples
    return dict(zip(samples["id"].to_pylist(), samples["split"].to_pylist(), strict=True))


def counts_of(archive: ImageFolder) -> dict[tuple[str, int], int]:
    rows = archive.index().samples.to_pylist()
    return dict(Counter((row["split"], row["labels"][0]) for row in rows))


@pytest.fixture(scope="module")
def cifar10(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 30 images of each class and split."""
    root = tmp_path_factory.mktemp("images")
    with zipfile.ZipFile(shared_data / "cifar10.zip") as archive:
        archive.extractall(root, [name for name in archive.namelist() if int(Path(name).stem) < 30])
    return root / "cifar10"


def test_cifar10(cifar10: Path) -> None:
    archive = ImageFolder(str(cifar10))
    description = archive.description
    assert (description.kind, description.task) == ("image_folder", "single_label")
    assert description.class_names == CIFAR10_CLASSES
    assert [(group.name, group.shape, group.dtype) for group in description.groups] == [("rgb", (32, 32, 3), "uint8")]
    index = archive.index()
    index.samples.validate(full=True)
    assert index.samples.schema.equals(INDEX_SCHEMA)
    assert index.rejected.equals(REJECTED_SCHEMA.empty_table())
    expected = {
        (split, label): count
        for split, count in (("train", 27), ("validation", 3), ("test", 30))
        for label in range(10)
    }
    assert counts_of(archive) == expected
    for row in index.samples.to_pylist()[::13]:
        assert row["paths"] == [row["id"]]
        assert CIFAR10_CLASSES[row["labels"][0]] == row["id"].split("/")[1]
        with Image.open(cifar10 / row["id"]) as source:
            np.testing.assert_array_equal(read_sample(archive, row["paths"])["rgb"], np.asarray(source))


def test_cifar10_scaled(cifar10: Path) -> None:
    archive = ImageFolder(str(cifar10), image_size=16)
    assert archive.description.groups[0].shape == (16, 16, 3)
    path = archive.index().samples["id"][0].as_py()
    with Image.open(cifar10 / path) as source:
        halved = np.asarray(source, float).reshape(16, 2, 16, 2, 3).mean(axis=(1, 3))
    # The filter is a triangle that reaches further than the two pixels.
    assert np.abs(read_sample(archive, [path])["rgb"] - halved).mean() < 6


def test_splits_of_folders_are_kept(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 2, "train/b": 2, "val/a": 3, "test/b": 1})
    archive = ImageFolder(str(tmp_path))
    assert counts_of(archive) == {("train", 0): 2, ("train", 1): 2, ("validation", 0): 3, ("test", 1): 1}
    assert splits_of(archive)["val/a/000.png"] == "validation"


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
    with pytest.raises(ValueError, match=f"^{next(iter(settings))}=.* has no effect on {tmp_path}: it has "):
        archive.index()


def test_what_is_no_image_is_rejected(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 1, "train/a/deep": 1})
    for name in ("Thumbs.db", "a.gif", ".DS_Store"):
        (tmp_path / "train/a" / name).touch()
    image(tmp_path / "train/a/upper.PNG")
    index = ImageFolder(str(tmp_path), validation_fraction=0).index()
    assert index.samples["id"].to_pylist() == ["train/a/000.png", "train/a/upper.PNG"]
    assert index.rejected.schema.equals(REJECTED_SCHEMA)
    assert [(row["id"], row["reason"]) for row in index.rejected.to_pylist()] == [
        ("train/a/Thumbs.db", "not an image file"),
        ("train/a/a.gif", "not an image file"),
        ("train/a/deep", "nested folder"),
    ]


def test_links_out_of_the_archive_are_rejected(tmp_path: Path) -> None:
    images(tmp_path / "archive", {"train/a": 1})
    images(tmp_path / "elsewhere", {"b": 1})
    (tmp_path / "archive/train/a/secret.png").symlink_to("../../../elsewhere/b/000.png")
    archive = ImageFolder(str(tmp_path / "archive"), validation_fraction=0)
    assert archive.description.class_names == ("a",)
    index = archive.index()
    assert index.samples["id"].to_pylist() == ["train/a/000.png"]
    assert {row["id"]: row["reason"] for row in index.rejected.to_pylist()} == {"train/a/secret.png": "symbolic link"}


@pytest.mark.parametrize("folder", ["train/b", "val"])
def test_links_to_folders_out_of_the_archive_are_refused(tmp_path: Path, folder: str) -> None:
    """A class, or a split that would be drawn from the others instead, is many samples."""
    images(tmp_path / "archive", {"train/a": 2})
    images(tmp_path / "elsewhere", {"b": 1})
    link = tmp_path / "archive" / folder
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"^{link}: a symbolic link to .*/elsewhere, out of the archive: move the"):
        ImageFolder(str(tmp_path / "archive"), validation_fraction=0).index()


def test_the_size_of_most_images_is_the_size_of_all(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"damaged")
    image(tmp_path / "a" / "00.png", 1, 1)
    for number in range(1, 4):
        image(tmp_path / "a" / f"{number}.png", 5, 7)
    image(tmp_path / "b" / "0.png", 7, 5)
    archive = ImageFolder(str(tmp_path))
    assert archive.description.groups[0].shape == (5, 7, 3)
    assert read_sample(archive, ["a/1.png"])["rgb"].shape == (5, 7, 3)
    with pytest.raises(BadRecordError, match="wrong size"):
        read_sample(archive, ["b/0.png"])
    with pytest.raises(BadRecordError, match=r"wrong size \(\(1, 1\) pixels"):
        read_sample(archive, ["a/00.png"])
    with pytest.raises(BadRecordError, match="not a readable JPEG or PNG"):
        read_sample(archive, ["a/0.png"])
    assert read_sample(ImageFolder(str(tmp_path), image_size=4), ["b/0.png"])["rgb"].shape == (4, 4, 3)


def test_images_of_many_sizes_need_the_setting(tmp_path: Path) -> None:
    for number in range(40):
        image(tmp_path / "a" / f"{number}.png", 4, 5 + number % 2)
        image(tmp_path / "b" / f"{number}.png", 4 + number % 3, 5)
    with pytest.raises(ValueError, match=r"different sizes \(4 x 5, .* pixels, \.\.\.\): set archive\.image_size"):
        _ = ImageFolder(str(tmp_path)).description
    assert ImageFolder(str(tmp_path), image_size=4).description.groups[0].shape == (4, 4, 3)


def test_images_of_which_none_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="none of 1 images can be read"):
        ImageFolder(str(tmp_path)).index()


def test_a_class_without_training_images(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 1, "test/a": 1})
    (tmp_path / "train/b").mkdir()
    with pytest.raises(ValueError, match="1 class folders hold no images, the first is 'train/b'"):
        ImageFolder(str(tmp_path)).index()


def test_a_class_without_test_images(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 1, "train/b": 1, "test/a": 1})
    (tmp_path / "test/b").mkdir()
    assert counts_of(ImageFolder(str(tmp_path))) == {("train", 0): 1, ("train", 1): 1, ("test", 0): 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 0}, "image_size is 0, expected 1 or more, or None"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0, expected 0 or more and below 1"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1"),
        ({"split_fractions": (1.0,)}, "split_fractions is"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageFolder("/archive", **settings)


def test_a_missing_archive(tmp_path: Path) -> None:
    archive = ImageFolder(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match="absent: no such folder, expected the archive with its class folders"):
        archive.index()
    (tmp_path / "absent").write_bytes(b"a file")
    with pytest.raises(FileNotFoundError, match="absent: no such folder, expected"):
        ImageFolder(str(tmp_path / "absent")).index()


def test_an_executor_gets_the_description_and_not_the_list_of_files(tmp_path: Path) -> None:
    images(tmp_path, {"train/a": 200})
    archive = ImageFolder(str(tmp_path))
    archive.index()
    travelled = pickle.dumps(archive)
    assert len(travelled) < 1500
    for path in tmp_path.rglob("1*.png"):
        path.unlink()
    copy = pickle.loads(travelled)
    assert copy == archive
    assert copy.description == archive.description
    assert len(copy.index().samples) == 100
    np.testing.assert_array_equal(
        read_sample(copy, ["train/a/000.png"])["rgb"], read_sample(archive, ["train/a/000.png"])["rgb"]
    )
