"""How a job ends: the exit code, what is printed, the result."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError

from jobs.shell.command import Result, run
from pipelines.launch.driver.failure import InfrastructureError, Outcome, RankLostError, StartError, WorkerError
from pipelines.spark.jobs import JobCancelledError
from pipelines.storage.folder import StorageError


def outcomes(kind: str) -> list[Outcome]:
    return [Outcome(0, "127.0.0.1", kind, "boom")]  # type: ignore[arg-type]


def fail(error: BaseException) -> Callable[[Result], None]:
    def body(result: Result) -> None:
        raise error

    return body


def nothing(result: Result) -> None:
    """A job that does nothing."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("a value"), 2),
        (FileNotFoundError("no such file"), 2),
        (NotADirectoryError("no folder"), 2),
        (PermissionError("not yours"), 2),
        (WorkerError(outcomes("exception")), 3),
        (RankLostError(outcomes("died")), 4),
        (StartError("two of four ranks"), 4),
        (InfrastructureError("lost"), 4),
        (StorageError("no bucket"), 4),
        (RuntimeError("no slots"), 4),
        (OSError(28, "No space left on device"), 4),
        (ConnectionRefusedError(111, "Connection refused"), 4),
        (Py4JNetworkError("Answer from Java side is empty"), 4),
        (KeyboardInterrupt(), 130),
        (JobCancelledError("cancelled by a group"), 130),
    ],
)
def test_the_exit_code_says_whose_fault_it_is(
    error: BaseException, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert run("train", ["--result", str(path)], fail(error)) == code
    printed, result = capsys.readouterr().err, json.loads(path.read_text())
    assert printed.startswith("groundswell train: ")
    assert "Traceback (most recent call last)" not in printed
    assert (result["exit_code"], result["ended"] in printed) == (code, True)


@pytest.mark.parametrize(
    ("error", "asked", "code", "end"),
    [
        (TypeError("oops"), "", 1, "raise error\nTypeError: oops\ngroundswell train: error: oops\n"),
        (ValueError("x"), "1", 2, "raise error\nValueError: x\ngroundswell train: error: x\n"),
    ],
)
def test_a_bug_shows_its_traceback_and_a_mistake_on_request(
    error: Exception,
    asked: str,
    code: int,
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GROUNDSWELL_TRACEBACK", asked)
    assert run("train", [], fail(error)) == code
    assert capsys.readouterr().err.endswith(end)


def test_the_result_holds_what_the_job_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    def body(result: Result) -> None:
        assert json.loads(path.read_text()).items() >= {"exit_code": None, "ended": "running"}.items()
        result.run_id, result.metrics = "0123", {"val/f1_micro": 0.5}
        result.save()
        assert json.loads(path.read_text()).items() >= {"ended": "running", "run_id": "0123"}.items()

    assert run("train", [f"--result={path}"], body) == 0
    expected = {
        "verb": "train",
        "exit_code": 0,
        "ended": "finished",
        "run_id": "0123",
        "metrics": {"val/f1_micro": 0.5},
    }
    result = json.loads(path.read_text())
    assert {name: result[name] for name in expected} == expected


def test_neither_terminal_nor_result_holds_a_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUNDSWELL_TRACEBACK", "1")
    path, store = tmp_path / "result.json", "http://user:hunter2@mlflow.example:5000"

    def body(result: Result) -> None:
        result.dataset, result.predictions = "s3://KEY:SECRET@bucket/x", "https://host/x?sig=SECRET"
        result.continue_with = ["--set", "training.output=s3://KEY:SECRET@bucket/y"]
        raise RuntimeError(f"{store} does not answer")

    assert run("train", ["--result", str(path), "--set", f"tracking.uri={store}"], body) == 4
    printed, text, hidden = capsys.readouterr().err, path.read_text(), "http://***@mlflow.example:5000"
    assert not any(secret in printed + text for secret in ("hunter2", "SECRET"))
    assert f"RuntimeError: {hidden} does not answer\n" in printed
    assert f" --set tracking.uri={hidden} --set training.output=s3://***@bucket/y\n" in printed
    expected = {
        "dataset": "s3://***@bucket/x",
        "predictions": "https://host/x?sig=***",
        "ended": f"{hidden} does not answer",
        "continue_with": ["--set", "training.output=s3://***@bucket/y"],
    }
    result = json.loads(text)
    assert {name: result[name] for name in expected} == expected


@pytest.mark.parametrize("content", ['{"format_version":1,"kind":"grid"}\n{"kind":"cell"}\n', "{}", "[1]", "a: 1\n"])
def test_a_file_of_something_else_is_no_place_for_a_result(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.jsonl"
    path.write_text(content)
    assert run("compare", ["--result", str(path)], nothing) == 2
    assert "grid.jsonl is a file of something else, which it would replace" in capsys.readouterr().err
    assert path.read_text() == content


@pytest.mark.parametrize("spelling", ["{path}", "{folder}/../{folder.name}/run.json", "--model={path}"])
def test_a_result_does_not_replace_what_the_command_reads(
    spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert run("train", ["--result", str(path)], nothing) == 0
    before = path.read_text()
    assert run("evaluate", ["--model", spelling.format(path=path, folder=tmp_path), f"--result={path}"], nothing) == 2
    assert "run.json is what another argument names" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_result_goes_through_links_and_into_pipes(tmp_path: Path) -> None:
    link, file = tmp_path / "latest.json", tmp_path / "run.json"
    link.symlink_to(file)
    for _ in range(2):
        assert run("train", ["--result", str(link)], nothing) == 0
        assert (link.is_symlink(), json.loads(file.read_text())["exit_code"]) == (True, 0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)
    try:
        assert run("train", ["--result", str(pipe), "--set", "a=" + "b" * 1000], nothing) == 0
        lines = os.read(opened, 1 << 16).decode().splitlines()
    finally:
        os.close(opened)
    assert [json.loads(line)["ended"] for line in lines] == ["running", "finished"]


def test_a_result_that_can_no_longer_be_written_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()

    def body(result: Result) -> None:
        (folder / "result.json").unlink()
        folder.rmdir()

    assert run("train", ["--result", str(folder / "result.json")], body) == 4
    assert "result.json cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("is_submitted", [False, True])
def test_a_failed_job_says_which_command_continues(
    is_submitted: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(result: Result) -> None:
        result.continue_with = ["--set", "training.resume_run=0123"]
        raise RankLostError(outcomes("died"))

    argv = [
        *("--config", "my config.yaml", "--set", "training.resume_run=old", "--set", "training.epochs=3"),
        *("--set", "tracking.run_name=first try"),
    ]
    typed = "groundswell train --config 'my config.yaml' --set training.epochs=3 --set 'tracking.run_name=first try'"
    if is_submitted:
        monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
        typed = "the same spark-submit command, with"
    assert run("train", argv, body) == 4
    assert capsys.readouterr().err.endswith(f"groundswell train: to continue: {typed} --set training.resume_run=0123\n")


@pytest.mark.parametrize(("number", "again"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_sigterm_ends_a_job_as_ctrl_c_does(number: int, again: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run("train", [], lambda result: signal.raise_signal(number)) == 130
    shown = f"\nstopping; {again} again stops at once\ngroundswell train: interrupted\n"
    assert capsys.readouterr().err == shown
    assert signal.getsignal(signal.SIGTERM) == before
