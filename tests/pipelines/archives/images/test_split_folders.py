from pathlib import Path

import pytest

from pipelines.archives.images.split_folders import find_class_folders
from tests.pipelines.archives.files import fill, reasons


def is_image(name: str) -> bool:
    return name.endswith(".jpg")


def test_classes_at_the_top(tmp_path: Path) -> None:
    tree = find_class_folders(str(fill(tmp_path, "dog/1.jpg", "cat/1.jpg", "README.md", ".git/x")), is_image)
    assert (tree.folders, tree.splits, tree.rejected) == (["cat", "dog"], [None, None], [])


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "Val"])
def test_classes_in_splits_those_of_train_first(tmp_path: Path, validation: str) -> None:
    paths = ["test/cat/1.jpg", f"{validation}/dog/1.jpg", "train/dog/1.jpg", "train/cat/1.jpg", "labels.csv"]
    tree = find_class_folders(str(fill(tmp_path, *paths)), is_image)
    assert (tree.folders, tree.splits, tree.rejected) == (
        ["train/cat", "train/dog", f"{validation}/dog", "test/cat"],
        ["train", "train", "validation", "test"],
        [],
    )


def test_a_class_may_have_the_name_of_a_split(tmp_path: Path) -> None:
    tree = find_class_folders(str(fill(tmp_path, "bus/1.jpg", "train/1.jpg")), is_image)
    assert (tree.folders, tree.splits) == (["bus", "train"], [None, None])


def test_images_outside_of_class_folders_are_rejected(tmp_path: Path) -> None:
    root = fill(tmp_path, "0.jpg", "README.md", "train/cat/1.jpg", "train/2.jpg", "test/cat/1.jpg", "test/about.txt")
    (tmp_path / "test" / "elsewhere").symlink_to("/etc/hostname")
    assert reasons(find_class_folders(str(root), is_image).rejected) == [
        ("0.jpg", "not in a class folder"),
        ("train/2.jpg", "not in a class folder"),
        ("test/elsewhere", "symbolic link"),
    ]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["1.jpg"], r"holds no class folders, expected <class>/\* or train/<class>/\*"),
        (["train/1.jpg", "test/1.jpg"], "holds no class folders"),
        (["train/cat/1.jpg", "labels/cat.txt"], "holds 'labels' beside train, expected only splits or only classes"),
        (["val/cat/1.jpg", "test/cat/1.jpg"], "holds test, val, expected train and at most one each"),
        (
            ["train/cat/1.jpg", "val/cat/1.jpg", "valid/cat/1.jpg"],
            "holds train, val, valid, expected train and at most",
        ),
        (["train/cat/1.jpg", "test/cat/1.jpg", "test/fox/1.jpg"], "class 'fox' is in test but not in train"),
    ],
)
def test_other_layouts(tmp_path: Path, paths: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_class_folders(str(fill(tmp_path, *paths)), is_image)
