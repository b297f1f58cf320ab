"""What a job may write at a place that the user names: nothing in a dataset, and nothing over files of others."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.dataset.format.files import dataset_around
from pipelines.storage.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_MARK = b"Software\0Matplotlib"
"""What every PNG file has that a job drew, near its beginning."""
_BEGINNING_BYTES = 4096
_DOTS_PER_INCH = 120


def check_outputs(argument: str, files: Mapping[Path, bytes]) -> None:
    """Make sure, before the work, that files may be written.

    Args:
        argument: The argument that names them, with its value.
        files: Each file with its mark: a file that would be replaced has it near its beginning, or is empty.

    Raises:
        ValueError: A file lies in a dataset, or would replace one that has no such mark.
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
    """Make sure that a file is not to be written into a dataset, which would not be repaired or replaced then.

    Args:
        argument: The argument that names it, with its value.
        file: The file.

    Raises:
        ValueError: It lies in a dataset.
    """
    dataset = dataset_around(file)
    if dataset is not None:
        raise ValueError(
            f"{argument} would write into the dataset {dataset}, whose folder holds its own files only: choose "
            "another place"
        )


def save_plot(figure: "Figure", file: Path) -> None:
    """Write a figure as PNG, completely or not at all.

    Raises:
        OSError: The file cannot be written.
    """
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=_DOTS_PER_INCH)
    write_whole(file, png.getvalue())
