"""Paths of the configuration in the form that workers can use, and checks of the files that a job writes.

No such file lies in a dataset, and none replaces a foreign file.
"""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import load as configurations
from conf.schema import RunConfig
from jobs.shell.notebook import show_configurations
from pipelines.dataset.format.files import dataset_around
from pipelines.storage.locations import absolute_location, absolute_path, is_url, local_path
from pipelines.storage.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PLOT_MARK = b"Software\0Matplotlib"
"""Mark near the beginning of every PNG file that a job drew."""
_BEGINNING_BYTES = 4096
_DOTS_PER_INCH = 120


def load(name_or_path: str | Path | None, settings: Sequence[str] = (), **sections: Any) -> RunConfig:
    """Read a shipped configuration or a YAML file, apply changes, validate.

    Args:
        name_or_path: Name of a shipped configuration, or the path of a YAML file, which may begin with `~`, `$VAR`,
            `file:` or `dbfs:`; None: the defaults alone.
        settings: `section.key=value` each, the value in YAML; the last one of a key counts.
        sections: Changes by section, as Python's values: `training={"epochs": 3}`. They come after `settings`.

    Raises:
        FileNotFoundError: The argument is neither a shipped name nor a file.
        ValueError: A path is misspelt, the file is not YAML, or a setting has a mistake. Each problem is a line.
    """
    if name_or_path is not None:
        found = local_path(name_or_path, "config")
        # Other texts do not change: `./demo` is a file, `demo` a shipped configuration.
        name_or_path = str(name_or_path) if found == Path(name_or_path) else str(found)
    show_configurations()
    return configurations.load(name_or_path, settings, **sections)


def setting_of(key: str, location: str | Path) -> str:
    """Return a path or URL as a setting: in quotes, so that YAML reads every value as a text.

    Letters beyond U+FFFF are not escaped: YAML reads their escapes in JSON as two letters.
    """
    return f"{key}={json.dumps(str(location), ensure_ascii=False)}"


def with_absolute_paths(config: RunConfig, *, reads_dataset: bool = True) -> RunConfig:
    """Return the configuration with absolute paths: workers have another working directory than the driver.

    Args:
        config: The configuration.
        reads_dataset: Whether the job needs `dataset.path`.

    Raises:
        ValueError: A path is misspelt (`locations.absolute_location`), or `dataset.path` is not set; the message names
            the setting. Or `training.output` is a URL, and the records should stay there.
    """
    changes: dict[str, dict[str, Any]] = {"dataset": {"path": dataset_location(config)}} if reads_dataset else {}
    output = absolute_location(config.training.output, "training.output: ")
    if config.tracking.offline and is_url(output):
        raise ValueError(
            "tracking.offline=true keeps all records of a run on this machine, where resuming it and `groundswell "
            f"sync` look for them, and training.output={output} is a URL: set it to a folder, or tracking.offline=false"
        )
    changes["training"] = {"output": output}
    cache = config.reader.cache_folder
    changes["reader"] = {"cache_folder": cache and absolute_path("reader.cache_folder", cache)}
    source = config.warm_start.source
    if source is not None and not config.warm_start.is_logged:
        changes["warm_start"] = {"source": absolute_path("warm_start.source", source)}
    return config.with_values(**changes)


def dataset_location(config: RunConfig) -> str:
    """Return the absolute path or the URL of the configured dataset.

    Raises:
        ValueError: The path is misspelt or not set.
    """
    if not config.dataset.path:
        raise ValueError("dataset.path is not set: name the folder or URL of the prepared dataset")
    return absolute_location(config.dataset.path, "dataset.path: ")


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
