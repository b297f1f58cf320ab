"""The common parts of all jobs: arguments, configuration, one readable error, the exit code, the result."""

import argparse
import errno
import json
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from conf.effect import refuse_idle, refuse_without_effect
from conf.load import base_of, keys_of, resolve
from conf.schema import RunConfig
from jobs.shell.paths import check_outside_datasets
from pipelines.launch.driver.failure import WorkerError
from pipelines.machine.console import PrintableFormatter, printable
from pipelines.machine.json_text import parse_json
from pipelines.machine.notebook import in_notebook
from pipelines.machine.packages import MissingPackageError
from pipelines.storage.locations import local_path, redacted, redacted_traceback
from pipelines.storage.whole_files import os_errors_as, write_whole

USER_ERROR, WORKER_ERROR, INFRASTRUCTURE, INTERRUPTED, BUG = 2, 3, 4, 130, 1
TRACEBACK_VARIABLE = "GROUNDSWELL_TRACEBACK"
_OF_NEW_RUNS = ("warm_start.source", "tracking.experiment", "tracking.run_name")
_USER_ERRORS = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    MissingPackageError,
)
RUNNING = "running"


@dataclass
class Result:
    """The results of a job; they are filled in while it runs, so that a failure keeps the earlier ones."""

    verb: str
    exit_code: int | None = None
    """Exit code of the job; null while the job runs, and if its process was killed."""
    ended: str = RUNNING
    """Reason of the end: `finished`, `interrupted`, or the error's message."""
    dataset: str | None = None
    """Path or URL of the dataset that was written or read."""
    run_id: str | None = None
    """MLflow's id of the run."""
    model_uri: str | None = None
    """Address of the model for `groundswell evaluate --model`."""
    checkpoint: str | None = None
    """Newest checkpoint."""
    predictions: str | None = None
    """Path or URL of the folder of predictions."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the epoch that provides the model's weights, or of the evaluation."""
    continue_with: list[str] | None = None
    """Arguments that, added to the same command, continue the job; null: nothing can be continued."""
    file: Path | None = field(default=None, init=False, repr=False)
    """File that `save` rewrites; the file itself does not contain it."""

    def save(self) -> str:
        """Rewrite the file with what is known now, if there is one; return why this failed, or an empty text.

        So the file of a killed job says what it did. A failure is an error only at the end of the job.
        """
        return "" if self.file is None else failure_of(self.write, self.file)

    def write(self, path: Path) -> None:
        """Write all results as JSON, without passwords; the file is replaced atomically.

        A link stays, and its target is replaced. A target that is no regular file, such as `/dev/stdout`, is written
        to.

        Raises:
            OSError: The folder does not exist or is not writable.
        """
        values = {name: redacted(value) if isinstance(value, str) else value for name, value in asdict(self).items()}
        del values["file"]
        if self.continue_with is not None:
            values["continue_with"] = [redacted(text) for text in self.continue_with]
        is_read_by_line = path.exists() and not path.is_file()
        write_whole(path, f"{json.dumps(values, indent=None if is_read_by_line else 1)}\n".encode())


def failure_of(write: Callable[..., None], *arguments: Any) -> str:
    """Write a file with a function and its arguments; return why this failed, or an empty text."""
    try:
        write(*arguments)
    except OSError as error:
        return str(error.strerror)
    return ""


def check_replaceable(path: Path) -> None:
    """Check that a file that a result would replace is an earlier result, or empty.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has other content.
    """
    try:
        before = path.read_bytes() if path.is_file() else b""
        values = parse_json(before) if before.strip() else {"exit_code": None, "ended": RUNNING}
    except ValueError:
        values = None
    if not isinstance(values, dict) or not {"exit_code", "ended"} <= values.keys():
        raise ValueError(f"--result {path} is a file of something else, which it would replace: choose another file")


def model_uri_of(text: str) -> str:
    """Return a model's URI or the folder of an exported model, which may be named by the file of `train --result`.

    Raises:
        ValueError: A path is misspelt, the file cannot be read, or its job logged no model.
    """
    if not text.endswith(".json"):
        is_path = "://" not in text and not text.startswith(("runs:", "models:", "mlflow-artifacts:"))
        return str(local_path(text, "--model")) if is_path else text
    file = local_path(text, "--model")
    try:
        values = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {text} is no result of a training: {error}") from None
    found = values if isinstance(values, dict) else {}
    if not found.get("model_uri"):
        raise ValueError(f"--model {text}: that job has logged no model (it ended: {found.get('ended')})")
    return str(found["model_uri"])


class JobsFailedError(RuntimeError):
    """The error that some of several jobs have failed, with the exit code of their errors."""

    def __init__(self, text: str, codes: Collection[int]) -> None:
        """Take the message, and the exit codes of the errors; errors that the same command may solve come first."""
        super().__init__(text)
        self.code = next(code for code in (INFRASTRUCTURE, BUG, WORKER_ERROR, USER_ERROR) if code in codes)


def read_config(arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration of the arguments; it is read once.

    Raises:
        FileNotFoundError, ValueError: As `conf.load.load`; or a setting that the verb does not read.
    """
    if arguments.resolved is None:
        arguments.resolved = _config(arguments)
    config: RunConfig = arguments.resolved
    return config


def _config(arguments: argparse.Namespace) -> RunConfig:
    config = resolve(arguments.config, arguments.set)
    keys = keys_of(arguments.set)
    if "launch.master" in keys and is_submitted():
        raise ValueError("--set launch.master has no effect: spark-submit has chosen the master, by --master")
    refuse_without_effect(config, keys, verb=arguments.verb, reads=arguments.reads, ignores=arguments.ignores)
    refuse_idle(config, base_of(arguments.config), keys, f"config {arguments.config}: " if arguments.config else "")
    if config.training.resume_run is not None:  # it is no error, because the same command continues its run
        for key in sorted({*_OF_NEW_RUNS} & {*keys}):
            _tell(
                arguments.verb,
                f"--set {key} is not used: training.resume_run continues a run, with its weights, experiment and name",
            )
    return config


def is_submitted() -> bool:
    """Return whether spark-submit started this process: its JVM exists first, and knows the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def run(verb: str, argv: Sequence[str], body: Callable[[Result], None]) -> int:
    """Run a job and return its exit code; a failure prints one message on standard error.

    With `GROUNDSWELL_TRACEBACK` set in the environment, the error's traceback is printed as well.

    Args:
        verb: Name of the job.
        argv: Its arguments, as typed.
        body: The job, which fills in the result.
    """
    _quieten_libraries()
    result = Result(verb)
    path = _result_path(argv)
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may handle signals
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
    if is_main:
        _interrupt_on_signals(lambda: _end(result, INTERRUPTED, "interrupted"))
    try:
        try:
            if path is not None:
                _claim(result, path, argv)
            body(result)
            code, ended = 0, "finished"
        except KeyboardInterrupt as error:
            code, ended = INTERRUPTED, f"interrupted: {error}".removesuffix(": ")
            _tell(verb, ended)
        except Exception as error:
            code, ended = exit_code(error), message_of(error)
            if code == BUG or os.environ.get(TRACEBACK_VARIABLE):
                print(printable(redacted_traceback()), file=sys.stderr)
            _tell(verb, f"error: {ended}")
        if code not in (0, USER_ERROR) and result.continue_with is not None:
            _tell(verb, f"to continue: {_command(verb, argv, result.continue_with)}")
        return _end(result, code, ended)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_code(error: Exception) -> int:
    """Return 2 for a user's mistake, 3 for an exception of a rank's function, 4 for infrastructure, 1 for a bug."""
    if isinstance(error, JobsFailedError):
        return error.code
    if isinstance(error, _USER_ERRORS) or getattr(error, "errno", None) == errno.ENAMETOOLONG:
        return USER_ERROR
    if isinstance(error, WorkerError):
        return WORKER_ERROR
    # Py4J reports the death of the JVM with errors that are no RuntimeErrors.
    return INFRASTRUCTURE if isinstance(error, RuntimeError | OSError) or _is_of_py4j(error) else BUG


def say(*lines: str) -> None:
    """Print lines for the person at the terminal."""
    for line in lines:
        print(printable(line), flush=True)


def interactive() -> bool:
    """Return whether a person watches the output, in a terminal or a notebook."""
    return sys.stderr.isatty() or in_notebook()


def _claim(result: Result, path: Path, argv: Sequence[str]) -> None:
    """Replace an older result; fail early if the file cannot be written or belongs to another argument."""
    with os_errors_as(ValueError, f"--result {path} cannot be written"):
        check_replaceable(path)
    check_outside_datasets(f"--result {path}", path)
    if sum(_names(part, path) for text in argv for part in {text, text.partition("=")[2]}) > 1:
        raise ValueError(f"--result {path} is what another argument names, and would be replaced: choose another file")
    with os_errors_as(ValueError, f"--result {path} cannot be written"):
        result.write(path)
    result.file = path


def _names(text: str, file: Path) -> bool:
    """Return whether a part of an argument is the path of this file."""
    try:
        return file.is_file() and file.samefile(Path(text).expanduser())
    except (OSError, ValueError, RuntimeError):  # the text is no path
        return False


def _end(result: Result, code: int, ended: str) -> int:
    result.exit_code, result.ended = code, ended
    problem = result.save()
    if problem and code == 0:
        _tell(result.verb, f"error: --result {result.file} cannot be written: {problem}")
        return INFRASTRUCTURE
    return code


def _tell(verb: str, text: str) -> None:
    print(printable(redacted(f"groundswell {verb}: {text}")), file=sys.stderr, flush=True)


def message_of(error: Exception) -> str:
    """Return the text that is printed for an error."""
    if _is_of_py4j(error):
        return f"the connection to Spark's JVM is lost ({type(error).__name__}); its log says why"
    return str(error) or type(error).__name__


def _is_of_py4j(error: Exception) -> bool:
    return type(error).__module__.startswith("py4j.")


def _command(verb: str, argv: Sequence[str], more: Sequence[str]) -> str:
    """Return the typed command, without settings that `more` replaces."""
    if is_submitted():
        return ", ".join(["the same spark-submit command", *[f"with {shlex.join(more)}"] * bool(more)])
    replaced = {text.partition("=")[0] for text in more if "=" in text}
    typed: list[str] = []
    for text in argv:
        if text.removeprefix("--set=").partition("=")[0] in replaced:
            if typed and typed[-1] == "--set":
                typed.pop()
        else:
            typed.append(text)
    return shlex.join(["groundswell", verb, *typed, *more])


def _result_path(argv: Sequence[str]) -> Path | None:
    """Return `--result` before the arguments are parsed: a mistake in them is also written to the result."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--result", nargs="?")
    text: str | None = parser.parse_known_args(list(argv))[0].result
    try:
        return None if text is None else local_path(text)
    except ValueError:
        return None  # the path is misspelt; the parser reports that


def _interrupt_on_signals(at_once: Callable[[], object]) -> None:
    """End a job on SIGTERM as on Ctrl-C, and close what is open; a second signal ends the process at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            at_once()
            os._exit(INTERRUPTED)
        print(
            f"\nstopping; {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'} again stops at once",
            file=sys.stderr,
            flush=True,
        )
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)


def _quieten_libraries() -> None:
    logging.basicConfig(level=logging.WARNING)
    # Py4J prints the traceback of an interrupted call, which is no error.
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
        handler.addFilter(lambda record: "KeyboardInterrupt while sending command" not in record.getMessage())
    for library in ("alembic", "mlflow", "py4j", "petastorm"):
        logging.getLogger(library).setLevel(logging.ERROR)
