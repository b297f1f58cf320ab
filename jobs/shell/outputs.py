"""Checks of the files that a job writes: no file lies in a dataset, and none replaces a foreign file."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.dataset.format.files import dataset_around
from pipelines.storage.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_MARK = b"Software\0Matplotlib"
"""Mark near the beginning of every PNG file that a job drew."""
_BEGINNING_BYTES = 4096
_DOTS_PER_INCH = 120


def check_outputs(argument: str, files: Mapping[Path, bytes]) -> None:
    """Check, before the work, that files may be written.

    Args:
        argument: The argument that names the files, with its value.
        files: Each file with its mark: an existing file must have the mark near its beginning, or be empty.

    Raises:
        ValueError: A file lies in a dataset, or would replace a file without the mark.
    """
    for file, mark in files.items():
        check_outside_datasets(argument, file)
        if file.is_file():
            with file.open("rb") as stream:
                beginning = stream.read(_BEGINNING_BYTES)
            if beginning and mark not in beginning:
                raise ValueError(
                    f"{argument} would replace {file}, which groundswell has not written: move or remove {file.name}, "
                    "or choose another place"
                )


def check_outside_datasets(argument: str, file: Path) -> None:
    """Check that a file does not lie in a dataset, which could then not be repaired or replaced.

    Args:
        argument: The argument that names the file, with its value.
        file: The file.

    Raises:
        ValueError: The file lies in a dataset.
    """
    dataset = dataset_around(file)
    if dataset is not None:
        raise ValueError(
            f"{argument} would write into the dataset {dataset}, whose folder holds its own files only: choose "
            "another place"
        )


def save_plot(figure: "Figure", file: Path) -> None:
    """Write a figure as PNG atomically.

    Raises:
        OSError: The file cannot be written.
    """
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DOTS_PER_INCH)
    write_whole(file, png.getvalue())
