import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipelines.archives.archive import INDEX_SCHEMA, REJECTED_SCHEMA
from pipelines.archives.images.class_folders import (
    check_none_empty,
    find_class_folders,
    index_of,
    list_class_files,
    list_folder,
)
from tests.pipelines.archives.files import fill, reasons


def test_names_are_sorted_and_dot_files_passed_over(tmp_path: Path) -> None:
    contents = list_folder(str(fill(tmp_path, "b/x", "a/x", "2", "10", ".hidden", ".cache/x")))
    assert (contents.folders, contents.files, contents.rejected) == (["a", "b"], [("10", 1), ("2", 1)], [])


def test_links_may_lead_to_other_places_in_the_archive_only(tmp_path: Path) -> None:
    root = fill(tmp_path / "archive", "a/inside", ".store/object")
    fill(tmp_path, "outside", "archive-too/x")
    (root / "a/good").symlink_to("../.store/object")
    (root / "a/absolute").symlink_to(root / "a/inside")
    (root / "a/out").symlink_to("../../outside")
    (root / "a/out_by_name").symlink_to(tmp_path / "archive-too" / "x")
    (root / "a/folder_out").symlink_to(tmp_path)
    (root / "a/gone").symlink_to("nothing")
    (root / "a/circle").symlink_to("circle")
    contents = list_folder(str(root), "a")
    assert [name for name, _ in contents.files] == ["absolute", "good", "inside"]
    assert (reasons(contents.rejected), contents.rejected[3]) == (
        [(f"a/{name}", "symbolic link") for name in ["circle", "folder_out", "gone", "out", "out_by_name"]],
        {
            "id": "a/out",
            "file": str(root / "a/out"),
            "reason": "symbolic link",
            "detail": "to ../../outside",
        },
    )


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    fill(tmp_path / "real", "a/file")
    (tmp_path / "real/a/link").symlink_to("file")
    (tmp_path / "root").symlink_to("real")
    assert list_folder(str(tmp_path / "root"), "a").files == [("file", 1), ("link", 1)]


def test_what_is_no_file_or_has_no_proper_name_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(fill(tmp_path, "good.png", "back\\slash.png") / "pipe")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).write_bytes(b"")
    contents = list_folder(str(tmp_path))
    assert (contents.files, reasons(contents.rejected)) == (
        [("good.png", 1)],
        [
            ("back\\slash.png", "name is no plain file name"),
            ("caf\\xe9", "name is not UTF-8"),
            ("pipe", "not a regular file"),
        ],
    )
    pa.Table.from_pylist(contents.rejected, REJECTED_SCHEMA).validate(full=True)


def test_files_come_folder_after_folder(tmp_path: Path) -> None:
    fill(tmp_path, "b/2", "b/1", "a/3", "b/deep/4", "b/no")
    (tmp_path / "empty").mkdir()

    files = list_class_files(
        str(tmp_path), ["b", "empty", "a"], lambda folder, name: f"{name} in {folder}" if name == "no" else None
    )
    assert (files.paths.to_pylist(), files.folders.tolist(), files.sizes.tolist(), reasons(files.rejected)) == (
        ["b/1", "b/2", "a/3"],
        [0, 0, 2],
        [1, 1, 1],
        [("b/no", "no in b"), ("b/deep", "nested folder")],
    )
    with pytest.raises(ValueError, match="1 class folders hold no images, the first is 'empty'"):
        check_none_empty(str(tmp_path), ["b", "empty"], files)
    check_none_empty(str(tmp_path), ["b"], files)


def test_a_listing_becomes_an_index(tmp_path: Path) -> None:
    fill(tmp_path, "cat/é.jpg", "dog/1.jpg")
    files = list_class_files(str(tmp_path), ["cat", "dog"], lambda folder, name: None)
    index = index_of(files, np.array(["train", "validation"]), files.folders)
    table = index.samples
    table.validate(full=True)
    assert table.schema.equals(INDEX_SCHEMA)
    assert table.select(["id", "split", "labels", "paths", "size"]).to_pylist() == [
        {"id": "cat/é.jpg", "split": "train", "labels": [0], "paths": ["cat/é.jpg"], "size": 1},
        {"id": "dog/1.jpg", "split": "validation", "labels": [1], "paths": ["dog/1.jpg"], "size": 1},
    ]
    assert index.rejected.schema.equals(REJECTED_SCHEMA)


def test_no_folders_no_files() -> None:
    files = list_class_files("/nowhere", [], lambda folder, name: None)
    assert files.paths.type == pa.string()
    assert len(files.paths) == len(files.folders) == len(files.sizes) == 0


def is_image(name: str) -> bool:
    return name.endswith(".jpg")


@pytest.mark.parametrize(
    ("paths", "folders", "splits"),
    [
        (["dog/1.jpg", "cat/1.jpg", "README.md", ".git/x"], ["cat", "dog"], [None, None]),
        (["bus/1.jpg", "train/1.jpg"], ["bus", "train"], [None, None]),  # a class may have the name of a split
        *(
            (
                ["test/cat/1.jpg", f"{validation}/dog/1.jpg", "train/dog/1.jpg", "train/cat/1.jpg", "labels.csv"],
                ["train/cat", "train/dog", f"{validation}/dog", "test/cat"],
                ["train", "train", "validation", "test"],
            )
            for validation in ("val", "valid", "validation", "Val")
        ),
    ],
)
def test_classes_at_the_top_and_in_splits_those_of_train_first(
    tmp_path: Path, paths: list[str], folders: list[str], splits: list[str | None]
) -> None:
    tree = find_class_folders(str(fill(tmp_path, *paths)), is_image)
    assert (tree.folders, tree.splits, tree.rejected) == (folders, splits, [])


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
        (["Caf\xe9/1.jpg", "Cafe\u0301/1.jpg"], r"'Cafe\\u0301' and 'Caf\\xe9' are one name in two spellings"),
    ],
)
def test_other_layouts(tmp_path: Path, paths: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_class_folders(str(fill(tmp_path, *paths)), is_image)
