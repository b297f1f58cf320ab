"""What every job does alike: arguments, configuration, one readable error."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable

from conf.load import load, shipped_names
from conf.schema import RunConfig
from pipelines.locations import absolute_location, absolute_path

_USER_ERROR_EXIT_CODE = 2


def config_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add `--config` and `--set`."""
    parser.add_argument(
        "--config",
        default=default,
        required=default is None,
        metavar="NAME|PATH",
        help=f"a YAML file, or one of: {', '.join(shipped_names())}",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change one value of the configuration; may be repeated",
    )


def read_config(arguments: argparse.Namespace) -> RunConfig:
    """The configuration that the arguments ask for."""
    return load(arguments.config, arguments.set)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths: workers have another working directory than the driver.

    Raises:
        ValueError: A path is misspelt (`locations.absolute_location`); names the setting.
    """
    try:
        path = absolute_location(config.dataset.path)
    except ValueError as error:
        raise ValueError(f"dataset.path: {error}") from None
    dataset = config.dataset.model_copy(update={"path": path})
    output = absolute_path("training.output", config.training.output)
    training = config.training.model_copy(update={"output": output})
    cache = config.reader.cache_folder and absolute_path("reader.cache_folder", config.reader.cache_folder)
    reader = config.reader.model_copy(update={"cache_folder": cache})
    return config.model_copy(update={"dataset": dataset, "training": training, "reader": reader})


def run(name: str, body: Callable[[], int]) -> int:
    """Run a job; what users can mend is one message on standard error and exit code 2.

    With `GROUNDSWELL_TRACEBACK` set in the environment it is a traceback.
    """
    _quieten_libraries()
    signal.signal(signal.SIGTERM, _terminate)  # so that what was begun is closed as after Ctrl-C
    try:
        return body()
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("GROUNDSWELL_TRACEBACK"):
            raise
        print(f"groundswell {name}: error: {error}", file=sys.stderr)
        return _USER_ERROR_EXIT_CODE
    except KeyboardInterrupt:
        print(f"groundswell {name}: interrupted", file=sys.stderr)
        return 130


def _terminate(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def say(line: str) -> None:
    """One line for the person at the terminal."""
    print(line, flush=True)


def interactive() -> bool:
    """Whether somebody watches: a terminal or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _quieten_libraries() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for library in ("alembic", "mlflow", "py4j", "petastorm"):
        logging.getLogger(library).setLevel(logging.ERROR)
