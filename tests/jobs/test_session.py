import pytest

from jobs.session import spark_session


@pytest.mark.parametrize("variable", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_spark_connect_is_refused_before_anything_starts(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "sc://127.0.0.1")
    with (
        pytest.raises(RuntimeError, match="uses Spark Connect, which cannot run barrier stages: unset SPARK_REMOTE"),
        spark_session("tests", "local[2]"),
    ):
        pass
