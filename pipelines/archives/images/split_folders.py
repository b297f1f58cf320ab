"""Finds the class folders: below split folders, or at the top."""

from collections.abc import Callable
from dataclasses import dataclass

from pipelines.archives.images.class_folders import list_folder, refuse_linked_folders, rejection
from pipelines.sample import SPLITS, TEST_SPLIT, TRAINING_SPLIT, VALIDATION_SPLIT

SPLIT_OF_NAME = {
    "train": TRAINING_SPLIT,
    "val": VALIDATION_SPLIT,
    "valid": VALIDATION_SPLIT,
    "validation": VALIDATION_SPLIT,
    "test": TEST_SPLIT,
}


@dataclass(frozen=True)
class ClassTree:
    """Class folders, train first, and the split of each."""

    folders: list[str]
    """Folders relative to the root: `train/cat`, or `cat`."""
    splits: list[str | None]
    """Split of each folder; None if the archive has no splits."""
    rejected: list[dict[str, str]]
    """Rows of `REJECTED_SCHEMA`."""


def find_class_folders(root: str, is_image: Callable[[str], bool]) -> ClassTree:
    """Find the class folders of `train/<class>` and the other splits, or of `<class>`.

    Files beside class folders are no samples; images among them are rejected.

    Args:
        root: Path or URL of the archive.
        is_image: Function that decides by a file's name whether it is an image.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: It has no class folders, or splits are mixed with classes. The split train is missing, or a split
            exists twice. A class of another split is not in train. A folder is a link out of the archive.
    """
    top = list_folder(root)
    inside = {name: list_folder(root, name) for name in top.folders if name.lower() in SPLIT_OF_NAME}
    for contents in (top, *inside.values()):
        refuse_linked_folders(root, contents.rejected)
    rejected = top.rejected + [
        rejection(root, name, "not in a class folder") for name, _ in top.files if is_image(name)
    ]
    # A class may be called `train`: it contains no folders.
    if not any(contents.folders for contents in inside.values()):
        if not top.folders or len(inside) == len(top.folders):
            raise ValueError(f"{root}: holds no class folders, expected <class>/* or train/<class>/*")
        return ClassTree(top.folders, [None] * len(top.folders), rejected)
    if len(inside) < len(top.folders):
        others = [name for name in top.folders if name not in inside]
        raise ValueError(
            f"{root}: holds {others[0]!r} beside {', '.join(inside)}, expected only splits or only classes"
        )
    of_split = {SPLIT_OF_NAME[name.lower()]: name for name in inside}
    if len(of_split) < len(inside) or TRAINING_SPLIT not in of_split:
        raise ValueError(f"{root}: holds {', '.join(inside)}, expected train and at most one each of the other splits")
    folders: list[str] = []
    splits: list[str | None] = []
    for split in (split for split in SPLITS if split in of_split):
        name = of_split[split]
        unknown = set(inside[name].folders) - set(inside[of_split[TRAINING_SPLIT]].folders)
        if unknown:
            raise ValueError(f"{root}: class {min(unknown)!r} is in {name} but not in {of_split[TRAINING_SPLIT]}")
        folders += [f"{name}/{folder}" for folder in inside[name].folders]
        splits += [split] * len(inside[name].folders)
        rejected += inside[name].rejected + [
            rejection(root, f"{name}/{file}", "not in a class folder")
            for file, _ in inside[name].files
            if is_image(file)
        ]
    return ClassTree(folders, splits, rejected)
