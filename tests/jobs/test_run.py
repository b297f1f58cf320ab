"""How a job ends: the exit code, what is printed, the result."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError

from jobs.command import run
from jobs.result import Result
from pipelines.launch.failure import InfrastructureError, Outcome, RankLostError, StartError, WorkerError
from pipelines.storage import StorageError


def outcomes(kind: str) -> list[Outcome]:
    return [Outcome(0, "127.0.0.1", kind, "boom")]  # type: ignore[arg-type]


def fail(error: BaseException) -> Callable[[Result], None]:
    def body(result: Result) -> None:
        raise error

    return body


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
    ],
)
def test_the_exit_code_says_whose_fault_it_is(
    error: BaseException, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    assert run("train", ["--result", str(path)], fail(error)) == code
    printed = capsys.readouterr().err
    assert printed.startswith("groundswell train: ")
    assert "Traceback (most recent call last)" not in printed
    result = json.loads(path.read_text())
    assert result["exit_code"] == code
    assert result["ended"] in printed


def test_a_bug_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", [], fail(TypeError("oops"))) == 1
    printed = capsys.readouterr().err
    assert "Traceback (most recent call last)" in printed
    assert printed.endswith("groundswell train: error: oops\n")


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GROUNDSWELL_TRACEBACK", "1")
    assert run("train", [], fail(ValueError("a value"))) == 2
    printed = capsys.readouterr().err
    assert "raise error\nValueError: a value\ngroundswell train: error: a value\n" in printed


def test_the_result_holds_what_the_job_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    def body(result: Result) -> None:
        during = json.loads(path.read_text())
        assert (during["exit_code"], during["ended"]) == (None, "running")
        result.run_id, result.metrics = "0123", {"val/f1_micro": 0.5}

    assert run("train", [f"--result={path}"], body) == 0
    result = json.loads(path.read_text())
    assert (result["verb"], result["exit_code"], result["ended"]) == ("train", 0, "finished")
    assert (result["run_id"], result["metrics"]) == ("0123", {"val/f1_micro": 0.5})


def test_a_result_is_not_written_into_a_dataset(small_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", ["--result", str(small_dataset / "result.json")], lambda result: None) == 2
    assert f"--result {small_dataset}/result.json would write into the dataset" in capsys.readouterr().err
    assert not (small_dataset / "result.json").exists()


def test_nothing_on_the_terminal_holds_a_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUNDSWELL_TRACEBACK", "1")
    store = "http://user:hunter2@mlflow.example:5000"

    def body(result: Result) -> None:
        result.continue_with = []
        raise RuntimeError(f"{store} does not answer")

    assert run("train", ["--set", f"tracking.uri={store}"], body) == 4
    printed = capsys.readouterr().err
    assert "hunter2" not in printed
    assert "RuntimeError: http://***@mlflow.example:5000 does not answer\n" in printed
    assert "to continue: groundswell train --set tracking.uri=http://***@mlflow.example:5000\n" in printed


def test_a_result_holds_no_password(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    def body(result: Result) -> None:
        result.dataset = "s3://KEY:SECRET@bucket/x"
        result.predictions = "https://host/x?sig=SECRET"
        result.continue_with = ["--set", "training.output=s3://KEY:SECRET@bucket/y"]
        raise RuntimeError("s3://KEY:SECRET@bucket/x: no answer")

    assert run("score", ["--result", str(path)], body) == 4
    text = path.read_text()
    assert "SECRET" not in text
    result = json.loads(text)
    assert (result["dataset"], result["predictions"]) == ("s3://***@bucket/x", "https://host/x?sig=***")
    assert result["ended"] == "s3://***@bucket/x: no answer"
    assert result["continue_with"] == ["--set", "training.output=s3://***@bucket/y"]


@pytest.mark.parametrize("content", ['{"format_version":1,"kind":"grid"}\n{"kind":"cell"}\n', "{}", "[1]", "a: 1\n"])
def test_a_file_of_something_else_is_no_place_for_a_result(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grid.jsonl"
    path.write_text(content)
    assert run("compare", ["--result", str(path)], lambda result: None) == 2
    assert "grid.jsonl is a file of something else, which it would replace" in capsys.readouterr().err
    assert path.read_text() == content


@pytest.mark.parametrize("spelling", ["{path}", "{folder}/../{folder.name}/run.json", "--model={path}"])
def test_a_result_does_not_replace_what_the_command_reads(
    spelling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert run("train", ["--result", str(path)], lambda result: None) == 0
    before = path.read_text()
    model = spelling.format(path=path, folder=tmp_path)
    assert run("evaluate", ["--model", model, f"--result={path}"], lambda result: None) == 2
    assert "run.json is what another argument names" in capsys.readouterr().err
    assert path.read_text() == before


def test_a_result_goes_through_links_and_into_pipes(tmp_path: Path) -> None:
    link, file = tmp_path / "latest.json", tmp_path / "run.json"
    link.symlink_to(file)
    for _ in range(2):
        assert run("train", ["--result", str(link)], lambda result: None) == 0
        assert link.is_symlink()
        assert json.loads(file.read_text())["exit_code"] == 0
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)
    try:
        assert run("train", ["--result", str(pipe), "--set", "a=" + "b" * 1000], lambda result: None) == 0
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


def test_a_failed_job_says_which_command_continues(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(result: Result) -> None:
        result.continue_with = ["--set", "training.resume_run=0123"]
        raise RankLostError(outcomes("died"))

    settings = ("training.resume_run=old", "training.epochs=3", "tracking.run_name=first try")
    argv = ["--config", "my config.yaml", *(text for setting in settings for text in ("--set", setting))]
    assert run("train", argv, body) == 4
    typed = "groundswell train --config 'my config.yaml' --set training.epochs=3 --set 'tracking.run_name=first try'"
    command = f"{typed} --set training.resume_run=0123"
    assert capsys.readouterr().err.endswith(f"groundswell train: to continue: {command}\n")
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert run("train", argv, body) == 4
    expected = "to continue: the same spark-submit command, with --set training.resume_run=0123\n"
    assert capsys.readouterr().err.endswith(expected)


def test_sigterm_ends_a_job_as_ctrl_c_does(capsys: pytest.CaptureFixture[str]) -> None:
    def body(result: Result) -> None:
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert run("train", [], body) == 130
    assert capsys.readouterr().err.endswith("groundswell train: interrupted\n")
    assert signal.getsignal(signal.SIGTERM) == before
