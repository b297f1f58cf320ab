import os
from pathlib import Path

import pytest

from pipelines.locations import redacted
from pipelines.tracking import store


def test_the_default_store_is_sqlite_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    assert store.tracking_uri() == f"sqlite:///{tmp_path}/mlruns/mlflow.db"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{here}/mlflow.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("sqlite:///mlflow.db?timeout=60", "sqlite:///{here}/mlflow.db?timeout=60"),
        ("./mlruns", "file://{here}/mlruns"),
        ("file:./mlruns", "file://{here}/mlruns"),
        ("file:my%20runs", "file://{here}/my%20runs"),
        ("file:/data/mlruns", "file:/data/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("https://host:8080", "https://host:8080"),
    ],
)
def test_a_relative_store_is_the_drivers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, uri: str, expected: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    assert store.tracking_uri() == store.worker_environment()["MLFLOW_TRACKING_URI"] == expected.format(here=tmp_path)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("https://user:p@ss/word@host/mlflow", "https://user:p%40ss%2Fword@host/mlflow"),
        ("http://me@x.org:a%40b%zz:?#[@127.0.0.1:5000", "http://me%40x.org:a%40b%25zz%3A%3F%23%5B@127.0.0.1:5000"),
        ("https://user:p%40ss%2Fword@host", "https://user:p%40ss%2Fword@host"),
        ("https://user:5000@host", "https://user:5000@host"),
        ("https://host:5000/team@site", "https://host:5000/team@site"),
        ("https://token@host:5000", "https://token@host:5000"),
        ("http://[::1]:5000/team@site", "http://[::1]:5000/team@site"),
        ("postgresql://user:p@ss@host/db", "postgresql://user:p@ss@host/db"),
    ],
)
def test_a_password_is_quoted_once(monkeypatch: pytest.MonkeyPatch, uri: str, expected: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert store.tracking_uri() == store.worker_environment()["MLFLOW_TRACKING_URI"] == expected
    monkeypatch.setenv("MLFLOW_TRACKING_URI", expected)
    assert store.tracking_uri() == expected
    run = store.TrackedRun(expected, "1")
    assert not any(secret in store.show_command(run) for secret in ("ss", "a%40b", "token"))


def test_only_in_this_projects_folder_make_shows_the_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "Makefile").touch()  # of the user's own project
    for folder, command in ((project, "make ui"), (tmp_path, "mlflow ui --host 127.0.0.1 --backend-store-uri sqlite:")):
        monkeypatch.chdir(folder)
        assert store.show_command(store.TrackedRun(store.tracking_uri(), "1")).startswith(command)
    assert "workspace" in store.show_command(store.TrackedRun("databricks", "1"))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://user:pw@host/db", "postgresql://***@host/db"),
        ("mysql+pymysql://u:p@ss@host:3306/db", "mysql+pymysql://***@host:3306/db"),
        ("postgresql://user:p/ss@host/db", "postgresql://***@host/db"),
        ("postgresql://user:p@s/s@host/db?sslmode=require", "postgresql://***@host/db?sslmode=require"),
        ("//user:p@ss@host", "//***@host"),
        ("https://token@host:8080", "https://***@host:8080"),
        ("https://host/api?access_token=abc&page=2", "https://host/api?access_token=***&page=2"),
        ("postgresql://host/db?user=u&password=p@ss", "postgresql://host/db?user=u&password=***"),
        ("no answer from https://u:p@ss@host/x (timeout)", "no answer from https://***@host/x (timeout)"),
        ("sqlite:////data/mlflow@home.db", "sqlite:////data/mlflow@home.db"),
        ("http://127.0.0.1:5000/api/2.0/mlflow/runs/get?run_id=1", "http://127.0.0.1:5000/api/2.0/mlflow/runs/get?run_id=1"),
    ],
)  # fmt: skip
def test_secrets_are_not_shown(address: str, shown: str) -> None:
    assert redacted(address) == shown


def test_a_run_does_not_show_the_address_of_its_store() -> None:
    assert "secret" not in repr(store.TrackedRun("https://user:secret@host", "1"))


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////data/mlflow.db", True),
        ("mlruns", True),
        ("file:///data", True),
        ("https://host", False),
        ("postgresql://host/db", False),
        ("databricks", False),
        ("databricks://profile", False),
    ],
)
def test_remote_workers_need_a_store_that_they_reach(uri: str, file: bool) -> None:
    assert store.is_file_store(uri) is file
    store.check_workers_reach(uri, "local[2]")
    if file:
        with pytest.raises(RuntimeError, match="set MLFLOW_TRACKING_URI to a tracking server"):
            store.check_workers_reach(uri, "spark://host:7077")
    else:
        store.check_workers_reach(uri, "spark://host:7077")


def test_short_waits_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    before = dict(os.environ)
    with store.short_waits():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert dict(os.environ) == before


def test_a_notebooks_store_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # restored afterwards
    monkeypatch.chdir(tmp_path)
    try:
        for uri, expected in (
            ("https://user:p@ss/word@host", "https://user:p%40ss%2Fword@host"),
            ("sqlite:///relative.db", f"sqlite:///{tmp_path}/relative.db"),
            ("folder", f"file://{tmp_path}/folder"),
            ("databricks", "databricks"),
        ):
            mlflow.set_tracking_uri(uri)
            assert store.tracking_uri() == expected
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.parametrize(
    ("uri", "file"),
    [
        ("sqlite:////p/mlflow.db", "/p/mlflow.db"),
        ("sqlite:////p/mlflow.db?timeout=60", "/p/mlflow.db"),
        ("file:///p/mlruns", None),
        ("postgresql://host/db?sslmode=require", None),
        ("databricks", None),
    ],
)
def test_the_file_of_a_sqlite_store_has_no_query(uri: str, file: str | None) -> None:
    assert store.sqlite_file(uri) == (None if file is None else Path(file))


def test_a_sqlite_file_without_permission_is_found_behind_a_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.db").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "mlflow.db")
    with pytest.raises(RuntimeError, match=rf"see the rights of {tmp_path}/mlflow\.db$"):
        store.check_writable(f"sqlite:///{tmp_path}/mlflow.db?timeout=60")


@pytest.mark.parametrize("scheme", ["sqlite:///", "file://"])
def test_a_store_without_permission_is_one_line(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.check_writable(f"{scheme}{tmp_path}/not/there/yet")
    store.check_writable("https://host")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(RuntimeError, match=rf"^MLflow's store {scheme}.* does not exist, and cannot be written: see"):
        store.check_writable(f"{scheme}{tmp_path}/not/there/yet")
    (tmp_path / "here").touch()
    with pytest.raises(RuntimeError, match=rf"/here cannot be written: see the rights of {tmp_path}"):
        store.check_writable(f"{scheme}{tmp_path}/here")
