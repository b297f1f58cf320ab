import pytest

from pipelines.tracking import runs


def test_an_unknown_run_cannot_be_continued(mlflow_store: str) -> None:
    with pytest.raises(ValueError, match="0123456789abcdef"):
        runs.continue_run("0123456789abcdef")


def test_a_server_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(RuntimeError, match="MLFLOW_TRACKING_URI"):
        runs.start_run("tests", None, {}, {})
