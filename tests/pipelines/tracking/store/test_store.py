import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import unquote

import mlflow
import pytest

from pipelines.tracking.models.models import using_store
from pipelines.tracking.store import runs, store


@pytest.mark.parametrize(("folder", "earlier_runs"), [("here", 0), ("my runs", 2)])
def test_a_users_own_client_finds_our_runs(
    new_store: Callable[[Path], str],
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folder: str,
    earlier_runs: int,
) -> None:
    """MLflow's default store is used, also by `make ui`, and runs in our earlier default are named."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    here = tmp_path / folder
    earlier = new_store(here / "mlruns" / "mlflow.db")
    for _ in range(earlier_runs):
        mlflow.MlflowClient(earlier).create_run("0")
    new_store(here / "mlflow.db")
    monkeypatch.chdir(here)
    run = runs.start_run("tests", None, {}, {})
    [found] = mlflow.search_runs(experiment_names=["tests"], output_format="list")
    assert found.info.run_id == run.run_id
    assert f"{here}/mlruns/{found.info.experiment_id}/" in unquote(found.info.artifact_uri)
    assert runs.check_store() == f"{run.uri} answers"
    named = [record.getMessage() for record in caplog.records if record.name == store.__name__]
    keeps = f"has runs, and the store is {run.uri} now, as in MLflow itself: to keep the earlier one, set"
    assert named == [f"{here}/mlruns/mlflow.db {keeps} MLFLOW_TRACKING_URI={earlier}"] * bool(earlier_runs)
    assert {"/mlflow.db*", "/mlruns/"} <= {*(project / ".gitignore").read_text().splitlines()}


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
    for given in (uri, expected):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
        assert store.tracking_uri() == store.worker_environment()["MLFLOW_TRACKING_URI"] == expected
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


def test_a_run_does_not_show_the_address_of_its_store() -> None:
    assert "secret" not in repr(store.TrackedRun("https://user:secret@host", "1"))


@pytest.mark.parametrize(
    ("uri", "file", "sqlite"),
    [
        ("sqlite:////p/mlflow.db", True, Path("/p/mlflow.db")),
        ("sqlite:////p/my%20runs/mlflow.db?timeout=60", True, Path("/p/my runs/mlflow.db")),
        ("mlruns", True, None),
        ("file:///p/mlruns", True, None),
        ("https://host", False, None),
        ("postgresql://host/db?sslmode=require", False, None),
        ("databricks", False, None),
        ("databricks://profile", False, None),
    ],
)
def test_remote_workers_need_a_store_that_they_reach(uri: str, file: bool, sqlite: Path | None) -> None:
    assert (store.is_file_store(uri), store.sqlite_file(uri)) == (file, sqlite)
    store.check_workers_reach(uri, "local[2]")
    refusal = pytest.raises(RuntimeError, match="set MLFLOW_TRACKING_URI to a tracking server")
    with refusal if file else nullcontext():
        store.check_workers_reach(uri, "spark://host:7077")


def test_short_waits_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    before = dict(os.environ)
    with store.short_waits():
        assert dict(os.environ) == {**before, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    assert dict(os.environ) == before


def test_a_notebooks_store_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
            monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://of.the.environment")  # MLflow 2.13 leaves it as it was
            with using_store("http://of.a.call"):
                pass
            assert store.tracking_uri() == expected
    finally:
        mlflow.set_tracking_uri(None)


@pytest.mark.parametrize(("scheme", "query"), [("sqlite:///", ""), ("sqlite:///", "?timeout=60"), ("file://", "")])
def test_a_store_without_permission_is_one_line(
    scheme: str, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.check_writable(f"{scheme}{tmp_path}/not/there/yet{query}")
    store.check_writable("https://host")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(RuntimeError, match=rf"^MLflow's store {scheme}.* does not exist, and cannot be written: see"):
        store.check_writable(f"{scheme}{tmp_path}/not/there/yet{query}")
    (tmp_path / "here").touch()
    path = re.escape(f"/here{query}")
    with pytest.raises(RuntimeError, match=rf"{path} cannot be written: see the rights of {tmp_path}(/here)?$"):
        store.check_writable(f"{scheme}{tmp_path}/here{query}")
