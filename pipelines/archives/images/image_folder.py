"""JPEG and PNG files in one folder per class, the layout of ImageNet and many others.

```
<root>/train/<class>/*   <root>/validation/<class>/* (or val, valid)   <root>/test/<class>/*
<root>/<class>/*                                                       without splits: ours are stratified
```
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.sections.archives import ImageFolderConfig
from pipelines.archives.archive import ArchiveDescription, ArchiveIndex
from pipelines.archives.files import join
from pipelines.archives.images.class_folders import (
    ClassFiles,
    ClassTree,
    check_none_empty,
    class_name,
    find_class_folders,
    index_of,
    list_class_files,
)
from pipelines.archives.pixels.rgb_image import common_size, read_rgb, upright_size
from pipelines.archives.stratified import assign_splits, check_split
from pipelines.sample import TRAINING_SPLIT, VALIDATION_SPLIT, ImageGroup

KIND = "image_folder"
GROUP = "rgb"

_SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class ImageFolder:
    """A folder of images by class; each object lists it once, and the training folders name the classes."""

    root: str
    """Folder that holds the splits or the classes."""
    _: KW_ONLY
    image_size: int | None = ImageFolderConfig.default("image_size")
    """Side in pixels: the shorter side is scaled to it and the centre is cut out. None: the size of most images, and
    images of other sizes are bad records."""
    seed: int = ImageFolderConfig.default("seed")
    """Seed of the splits, if the archive has none."""
    split_fractions: Sequence[float] = tuple(ImageFolderConfig.default("split_fractions"))
    """Fractions of train, validation and test within every class, if the folders are classes."""
    validation_fraction: float = ImageFolderConfig.default("validation_fraction")
    """Part of every training class that becomes validation, if that folder is missing; 0: no validation split."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split_fractions", check_split(self.split_fractions))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the list of files out of the pickle for an executor, but keep the description."""
        return {name: value for name, value in vars(self).items() if name not in ("_tree", "_files")}

    @functools.cached_property
    def description(self) -> ArchiveDescription:
        """Classes by name, one per image, and the group `rgb` of `image_size`, or of the size of most images.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: It has no classes or images, splits and classes are mixed, or the images have different sizes
                and `image_size` is not set.
        """
        classes = tuple(dict.fromkeys(map(class_name, self._tree.folders)))
        paths = self._files.paths
        height, width = (
            (self.image_size, self.image_size)
            if self.image_size
            else common_size(self.root, len(paths), lambda row: upright_size(join(self.root, paths[row].as_py())))
        )
        group = ImageGroup(GROUP, (height, width, 3), "uint8", ("red", "green", "blue"))
        return ArchiveDescription(KIND, "single_label", classes, (group,))

    def index(self) -> ArchiveIndex:
        """List every image, by split, class and name.

        Raises:
            FileNotFoundError: The folder does not exist.
            ValueError: `description` fails, or a class of another split is not in train or has no training images.
        """
        tree, files = self._tree, self._files
        position = {name: number for number, name in enumerate(self.description.class_names)}
        labels = np.array([position[class_name(folder)] for folder in tree.folders], np.int32)[files.folders]
        given = [tree.splits[folder] for folder in files.folders.tolist()]
        keys = [path.rpartition(".")[0] for path in files.paths.to_pylist()]
        splits = assign_splits(self, given, keys, labels, has_validation=VALIDATION_SPLIT in tree.splits)
        return index_of(files, splits, labels)

    @property
    def read_settings(self) -> dict[str, int | None]:
        """Side to which images are scaled, or None if their size is not changed."""
        return {"image_size": self.image_size}

    def read(self, paths: Sequence[str], out: Mapping[str, NDArray[Any]]) -> None:
        """Decode one image: `rgb`, uint8.

        Raises:
            BadRecordError: The file is missing, damaged, animated, of another format or of the wrong size.
        """
        read_rgb(join(self.root, paths[0]), out[GROUP], fit=self.image_size is not None)

    @functools.cached_property
    def _tree(self) -> ClassTree:
        return find_class_folders(self.root, is_image)

    @functools.cached_property
    def _files(self) -> ClassFiles:
        tree = self._tree
        files = list_class_files(
            self.root, tree.folders, lambda _, name: None if is_image(name) else "not an image file"
        )
        training = [
            folder for folder, split in zip(tree.folders, tree.splits, strict=True) if split in (None, TRAINING_SPLIT)
        ]
        check_none_empty(self.root, training, files)
        return replace(files, rejected=tree.rejected + files.rejected)


def is_image(name: str) -> bool:
    """Return whether a file's name is that of an image."""
    return name.lower().endswith(_SUFFIXES)
